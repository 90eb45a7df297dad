"""Selections of tokens over a step, and MaxRL, against loops written from the papers."""

from dataclasses import replace

import pytest
import torch

from tests.groups import episode, group
from tests.losses.batches import fill, part, random_groups
from tests.reference import advantages as slow
from tests.reference.plain import plain
from whet.algorithms.grpo import GRPO, GroupAdvantage
from whet.algorithms.max_rl import MaxRLAdvantage
from whet.algorithms.presets import KL_COV
from whet.algorithms.presets import M2PO as M2PO_PRESET
from whet.algorithms.token_selection import M2PO, ClipCov, KLCov, covariances
from whet.base.errors import DataError
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task

SEEDS = (0, 1, 2)


def make(seed: int) -> Batch:
    return fill(random_groups(seed, (4, 3, 4, 4)), seed)[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_max_rl_divides_by_the_mean_reward(seed: int, eps: float) -> None:
    batch = make(seed)
    batch.reward = batch.reward + 1.0
    found = MaxRLAdvantage(eps=eps)(batch).advantages
    assert found.tolist() == pytest.approx(slow.max_rl(plain(batch), eps), rel=1e-10, abs=1e-10)
    assert (found > 0).any()


def test_max_rl_gives_exactly_nothing_where_all_failed() -> None:
    batch = make(0)
    batch.reward = torch.zeros_like(batch.reward)
    assert not MaxRLAdvantage(eps=0.0)(batch).advantages.any()


def test_max_rl_refuses_negative_rewards_by_the_name_of_their_group() -> None:
    batch = make(0)
    batch.reward = batch.reward.clamp(min=0.0)
    batch.reward[-1] = -0.5
    with pytest.raises(DataError, match=r"'task-3': the reward is -0.5, but max_rl divides by the mean"):
        MaxRLAdvantage()(batch)


def test_clip_cov_selects_its_share_of_the_candidates_and_draws_them_from_its_seed() -> None:
    batch = make(0)
    plain_advantages = GroupAdvantage()(batch).advantages
    wide = {"low": -9.0, "high": 9.0, "share": 0.3}

    def silent(seed: int) -> list[int]:
        found = ClipCov(seed=seed, **wide)(batch).advantages
        return ((found != plain_advantages) & (found == 0)).nonzero().squeeze(1).tolist()

    count = int(0.3 * int(batch.trained.sum()))
    assert count > 1
    assert 0 < len(silent(0)) <= count
    assert silent(0) == silent(0)
    assert len({tuple(silent(seed)) for seed in range(8)}) > 1
    assert int(ClipCov(**wide).selected(batch, plain_advantages).sum()) == count
    assert int(ClipCov(**wide | {"share": 1e-9}).selected(batch, plain_advantages).sum()) == 1


def test_a_share_of_tokens_is_counted_exactly() -> None:
    batch = Batch.from_groups([group("g", [1], [[2] * 100], [1.0])])  # 0.29 * 100 is 28.999999999999996
    batch.old_logprobs = batch.advantages = torch.arange(101.0).double()
    assert int(ClipCov(share=0.29, low=-9e9, high=9e9).selected(batch, batch.column("advantages")).sum()) == 29
    assert int(KLCov(share=0.29).selected(batch, batch.column("advantages")).sum()) == 29


def test_clip_cov_draws_other_tokens_in_another_step() -> None:
    drawn = []
    for step in range(2):
        batch = Batch.from_groups([group(f"{step:07d}:task", [1], [[2] * 20], [1.0])])
        batch.old_logprobs = batch.advantages = torch.arange(21.0).double()
        drawn.append(ClipCov(share=0.3, low=-9e9, high=9e9).selected(batch, batch.column("advantages")).tolist())
    assert drawn[0] != drawn[1]


def test_clip_cov_draws_the_same_tokens_however_prompts_are_shared() -> None:
    long = [7] * 40  # common to the first and the third answer, which are laid out next to each other
    episodes = [
        episode([Span([1], False), Span(context, False), Span([2, 3, row], True)], float(row))
        for row, context in enumerate([long, [5], long, [6]])
    ]
    drawn = []
    for share_prompts in (True, False):
        batch = Batch.from_groups([Group("g", Task("g", []), episodes)], share_prompts=share_prompts)
        assert (batch.trained_tokens.diff() < 0).any() == share_prompts
        values = torch.linspace(-2, 1, 12).double()  # by sequence and place
        batch.old_logprobs = torch.zeros(len(batch)).double().index_put((batch.trained_tokens,), values)
        found = ClipCov(low=-9.0, high=9.0, share=5 / 12).selected(batch, batch.old_logprobs)
        drawn.append(found[batch.trained_tokens].tolist())
    assert drawn[0] == drawn[1]


def test_clip_cov_refuses_bounds_with_nothing_between_them() -> None:
    with pytest.raises(ValueError, match="low must be below high"):
        ClipCov(low=2.0, high=2.0)


@pytest.mark.parametrize(("bounds", "selected"), [((1.0, 5.0), 0), ((0.5, 1.0), 0), ((0.5, 5.0), 4)])
def test_a_covariance_exactly_at_a_bound_of_clip_cov_is_outside(bounds: tuple[float, float], selected: int) -> None:
    groups = [group(name, [1], [[2, 3]], [1.0]) for name in "ab"]
    batch = Batch.from_groups(groups)
    sign = batch.per_token(torch.tensor([1.0, -1.0]).double())
    batch.old_logprobs = sign - 2.0
    found = ClipCov(low=bounds[0], high=bounds[1], share=1.0).selected(batch, sign)
    assert int(found.sum()) == selected


def test_m2po_keeps_tokens_whose_mean_is_exactly_at_the_threshold() -> None:
    batch = Batch.from_groups([group("a", [1], [[2, 3]])])
    advantages = batch.trained.double()
    batch.old_logprobs = batch.column("rollout_logprobs").double() + 0.5
    assert not M2PO(threshold=0.25).selected(batch, advantages).any()
    assert M2PO(threshold=0.24).selected(batch, advantages).sum() == 2


def test_covariances_are_0_for_a_single_token_and_where_nothing_is_trained() -> None:
    one = Batch.from_groups([group("a", [1], [[2]])])
    one.old_logprobs = one.trained * -2.0
    assert covariances(one, one.trained.double()).tolist() == [0.0, 0.0]
    batch = make(0)
    found = covariances(batch, GroupAdvantage()(batch).advantages)
    assert found[batch.trained].any()
    assert not found[~batch.trained].any()


def test_m2po_takes_no_mean_over_tokens_whose_log_probs_are_equal() -> None:
    batch = Batch.from_groups([group("a", [1], [[2, 3]])])
    batch.old_logprobs = batch.column("rollout_logprobs").double() + torch.tensor([0.0, 0.0, 0.5]).double()
    assert M2PO(threshold=0.2).selected(batch, batch.trained.double()).tolist() == [False, False, True]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [1e-9, 0.3])
def test_kl_cov_marks_the_largest_covariances(seed: int, share: float) -> None:
    batch = make(seed)
    before = batch.column("high_covariance").clone()
    filled = KLCov(share=share)(batch)
    advantages = filled.column("advantages")
    assert torch.equal(advantages, GroupAdvantage()(batch).advantages)
    covariance = slow.covariances(plain(batch), advantages.tolist())
    largest = sorted(covariance, key=covariance.__getitem__, reverse=True)
    count = max(1, int(share * len(covariance)))
    marked = filled.column("high_covariance")
    assert torch.equal(batch.column("high_covariance"), before), "the batch that is given stays as it is"
    assert set(marked.unique().tolist()) == {0.0, 1.0}
    assert sorted(marked.nonzero().squeeze(1).tolist()) == sorted(largest[:count])


@pytest.mark.parametrize("selection", [ClipCov(share=0.3, low=0.0), M2PO(threshold=0.002)], ids=repr)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_does_not_depend_on_how_the_step_is_split(selection: ClipCov | M2PO, seed: int) -> None:
    batch, output = fill(random_groups(seed, (4, 3, 4, 4)), seed)
    plain_advantages = GroupAdvantage()(batch).advantages
    batch.advantages = selection(batch).advantages
    assert not torch.equal(batch.advantages, plain_advantages)
    loss = GRPO(advantage=selection).loss
    (whole,) = torch.autograd.grad(loss(output, batch)[0], output.logprobs)
    split = torch.zeros_like(whole)
    for rows in torch.arange(batch.sequences).split(4):
        piece, tokens = batch.select(rows)
        split += torch.autograd.grad(loss(part(output, tokens), piece)[0], output.logprobs)[0]
    torch.testing.assert_close(split, whole)


def test_what_is_read_and_filled_follows_from_the_parts() -> None:
    assert ClipCov().reads == KLCov().reads == {"old_logprobs"}
    assert M2PO().reads == {"old_logprobs", "rollout_logprobs"}
    assert KLCov().fills == {"advantages", "high_covariance"}
    assert M2PO().compares
    assert MaxRLAdvantage().compares
    assert "old_logprobs" in KL_COV.reads


def test_the_surrogate_and_the_advantage_of_kl_cov_need_each_other() -> None:
    with pytest.raises(ValueError, match="high_covariance, which no part of this algorithm reads"):
        GRPO.model_validate({"advantage": "kl_cov"})
    with pytest.raises(ValueError, match="reads high_covariance, which no part of this algorithm fills"):
        GRPO.model_validate({"loss": {"type": "policy", "surrogate": "kl_cov"}})


def test_m2po_weighs_by_the_whole_ratio_to_the_generator() -> None:
    batch, output = fill(random_groups(0, (4, 3)), 0)
    batch = replace(batch, token_advantages=torch.where(batch.trained, 1.0, 0.0).double())
    (gradient,) = torch.autograd.grad(M2PO_PRESET.loss(output, batch)[0], output.logprobs)
    ratio = (output.logprobs.detach() - batch.rollout_logprobs).exp()
    expected = torch.where(batch.trained, -batch.weight * ratio, 0.0)
    torch.testing.assert_close(gradient, expected)
