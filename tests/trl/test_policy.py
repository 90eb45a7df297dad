"""GRPO and its family: our surrogates, KL and weightings against ``GRPOTrainer`` and ``RLOOTrainer``."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from tests.trl.scene import Scene, gradient, same, same_gradient, sampled, scene, trainer
from whet.core.types import Weighting
from whet.losses.composite import PolicyLoss

pytestmark = pytest.mark.trl
SEEDS = (0, 1, 2)
LONGEST = 12


def theirs(s: Scene, *, on_policy: bool = False, correction: Tensor | None = None, **changes: Any) -> Tensor:
    """``GRPOTrainer``'s loss of the scene. Turns of others inside an answer are masked by its ``tool_mask``."""
    settings: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "delta": None,
        "use_bias_correction_kl": False,
    } | changes
    in_args = {name: settings.pop(name) for name in ("delta", "use_bias_correction_kl")}
    its = trainer(
        GRPOTrainer,
        s.table,
        args=SimpleNamespace(steps_per_generation=1, **in_args),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(settings["entropy_coef"]),
        **settings,
    )
    one = torch.ones(len(s.ids), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": one * s.padding,
        "prompt_mask": one,
        "completion_ids": s.ids,
        "completion_mask": s.real,
        "tool_mask": s.trained,
        "advantages": s.padded(s.batch.advantages),
        "old_per_token_logps": None if on_policy else s.padded(s.batch.old_logprobs),
        "ref_per_token_logps": s.padded(s.batch.reference_logprobs),
        "num_items_in_batch": s.trained.sum(),
        "importance_sampling_ratio": correction,
    }
    return its._compute_loss(s.table, inputs)


def ours(s: Scene, weighting: Weighting = "sequence", on_policy: bool = False, **settings: Any) -> Tensor:
    s = s.weigh(weighting, LONGEST)
    batch = replace(s.batch, old_logprobs=None) if on_policy else s.batch
    return PolicyLoss.model_validate(settings)(s.output, batch)[0]


WEIGHTINGS: list[tuple[str, Weighting]] = [
    ("grpo", "sequence"),
    ("bnpo", "token"),
    ("dapo", "token"),
    ("dr_grpo", "constant"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "weighting"), WEIGHTINGS)
def test_each_normalisation_is_a_weighting(name: str, weighting: Weighting, seed: int) -> None:
    s = scene(sampled(seed), seed)
    same(ours(s, weighting), theirs(s, loss_type=name), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_higher(seed: int) -> None:
    s = scene(sampled(seed), seed)
    clip = {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28}
    same(ours(s, "token", surrogate=clip), theirs(s, loss_type="dapo", epsilon_low=0.1, epsilon_high=0.28), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_delta_is_the_dual_clip(seed: int) -> None:
    s = scene(sampled(seed), seed, noise=1.0)
    same(ours(s, surrogate={"type": "ppo_clip", "dual_clip": 1.5}), theirs(s, delta=1.5), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_is_the_sequence_level_ratio(seed: int) -> None:
    s = scene(sampled(seed), seed)
    gspo = {"type": "gspo", "clip_low": 0.05, "clip_high": 0.1}
    its = theirs(s, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1)
    same(ours(s, surrogate=gspo), its, s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_up_to_where_the_bound_is_counted_from(seed: int) -> None:
    """TRL's ``epsilon_high`` is the bound of the ratio itself, ours its distance from 1, as the paper writes it."""
    s = scene(sampled(seed), seed, noise=1.0)
    same(
        ours(s, "token", surrogate={"type": "cispo", "clip_high": 0.5}),
        theirs(s, loss_type="cispo", epsilon_high=1.5),
        s.table,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "weighting"), WEIGHTINGS)
def test_kl_term(name: str, weighting: Weighting, seed: int) -> None:
    s = scene(sampled(seed), seed)
    same(ours(s, weighting, kl={"coefficient": 0.3}), theirs(s, loss_type=name, beta=0.3), s.table)


def test_kl_is_bounded_where_theirs_overflows() -> None:
    s = scene(sampled(0), 0)
    far = s.batch.trained.nonzero()[0, 0]
    reference = s.batch.reference_logprobs.clone()
    reference[far] = s.table.logprobs()[far].detach() + 900
    s = replace(s, batch=replace(s.batch, reference_logprobs=reference))
    assert theirs(s, loss_type="dapo", beta=1.0).isinf()
    finite = replace(s, batch=replace(s.batch, reference_logprobs=reference.index_fill(0, far, 0.0)))
    finite.batch.reference_logprobs[far] = s.table.logprobs()[far].detach()
    bound = 10.0 / s.batch.trained.sum()  # KL.output_clamp, at one token; there the finite scene has 0
    kl = {"coefficient": 1.0}
    torch.testing.assert_close(ours(s, "token", kl=kl), theirs(finite, loss_type="dapo", beta=1.0) + bound)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False], ids=["on policy", "off policy"])
def test_unbiased_kl_gradient_is_their_bias_correction(on_policy: bool, seed: int) -> None:
    s = scene(sampled(seed), seed)
    same(
        ours(s, on_policy=on_policy, kl={"coefficient": 0.3, "unbiased_gradient": True}),
        theirs(s, on_policy=on_policy, beta=0.3, use_bias_correction_kl=True),
        s.table,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_truncated_importance_sampling_multiplies_the_surrogate_and_not_the_kl(seed: int) -> None:
    s = scene(sampled(seed), seed)
    ratio = (s.padded(s.batch.old_logprobs) - s.padded(s.batch.rollout_logprobs)).exp().clamp(max=1.2)
    settings = {"correction": {"type": "tis", "cap": 1.2}, "kl": {"coefficient": 0.3}}
    same(ours(s, **settings), theirs(s, correction=ratio, beta=0.3), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus_of_a_token_mean(seed: int) -> None:
    s = scene(sampled(seed), seed)
    same(ours(s, "token", entropy_coefficient=0.2), theirs(s, loss_type="dapo", entropy_coef=0.2), s.table)


def test_our_entropy_bonus_follows_the_weighting_and_theirs_is_always_a_token_mean() -> None:
    s = scene(sampled(0), 0)
    entropy = s.padded(s.table.entropy())
    by_sequence = (entropy.sum(1) / s.trained.sum(1)).mean()
    by_token = entropy.sum() / s.trained.sum()
    same(
        ours(s, "sequence", entropy_coefficient=0.2) + 0.2 * (by_sequence - by_token),
        theirs(s, entropy_coef=0.2),
        s.table,
    )


def test_answers_that_train_nothing_count_in_their_mean_and_not_in_ours() -> None:
    s = scene(sampled(0, only_trained=False), 0)
    counted = (s.trained.sum(1) > 0).sum()
    assert counted < len(s.ids)
    for name, weighting in WEIGHTINGS:
        of_answers = weighting in ("sequence", "constant")
        factor = counted.double() / len(s.ids) if of_answers else 1.0
        same(ours(s, weighting) * factor, theirs(s, loss_type=name), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_has_the_gradient_of_reinforce(seed: int) -> None:
    """On policy only, which is what REINFORCE is for; the values differ: -A against -A lp. TRL sums over an answer."""
    s = scene(sampled(seed), seed).weigh("constant", 1)
    its = trainer(RLOOTrainer, s.table, epsilon_low=0.2, epsilon_high=0.2)
    one = torch.ones(len(s.ids), 1, dtype=torch.long)
    advantages = s.padded(s.batch.advantages).sum(1) / s.trained.sum(1)
    inputs = {
        "prompt_ids": one * s.padding,
        "prompt_mask": one,
        "completion_ids": torch.where(s.trained.bool(), s.ids, s.padding),
        "completion_mask": s.trained,
        "old_logps": s.padded(s.table.logprobs()).sum(1).detach(),
        "advantages": advantages,
    }
    loss = its._compute_loss(s.table, inputs)
    our = PolicyLoss.model_validate({"surrogate": "reinforce"})(s.output, replace(s.batch, old_logprobs=None))[0]
    same_gradient(our, loss, s.table)
    torch.testing.assert_close(loss, -advantages.mean())


def test_a_wrong_sign_would_be_noticed() -> None:
    s = scene(sampled(0), 0)
    assert not torch.allclose(gradient(-ours(s), s.table), gradient(theirs(s), s.table))
    with pytest.raises(AssertionError):
        same(ours(s, "token"), theirs(s, loss_type="grpo"), s.table)
