"""Sequences whose gradient is exactly 0 are not computed, and everything stays the number it was."""

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.groups import groups as some_groups
from tests.learner.parts import ADAMW, VOCABULARY, assert_close, some_batch, weights, whole, worker
from tests.losses.cases import CASES, POLICY, Case
from whet.algorithms.grpo import GroupAdvantage
from whet.cluster.local import LocalCluster
from whet.core.batch import Batch
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.learner.worker import LearnerWorker
from whet.losses.composite import PolicyLoss
from whet.losses.off_policy import mismatch_metrics
from whet.losses.weighted import WeightedLoss
from whet.models.config import ModelConfig

PLAIN = ("ppo", "gspo", "cispo", "reinforce", "sapo", "dppo", "gmpo")
"""Surrogates that come with whet and scale with the advantage."""


def silenced(batch: Batch, seed: int) -> Batch:
    """The batch with advantages of 0 in a random half of its sequences."""
    dice = random.Random(seed)
    keep = torch.tensor([float(dice.random() < 0.5) for _ in range(batch.sequences)], dtype=torch.float64)
    factor = torch.where(batch.trained, keep[batch.sequence.clamp(min=0)], torch.ones(len(batch), dtype=torch.float64))
    return replace(batch, token_advantages=batch.column("advantages") * factor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_loss_calls_zero_has_no_loss_and_no_gradient(case: Case, seed: int) -> None:
    batch, output = case.make(seed)
    batch = silenced(batch, seed)
    loss: WeightedLoss = case.loss
    zero = loss.zero_gradient(batch)
    assert zero.shape == (batch.sequences,)
    value, _ = loss(output, batch)
    leaves = [leaf for leaf in (output.logprobs, output.entropy, output.values, output.topk) if leaf is not None]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    own = batch.trained & zero[batch.sequence.clamp(min=0)]
    assert all(not gradient[own].any() for gradient in found if gradient is not None)
    per_token, _ = loss.per_token(output, batch)
    assert not per_token[own].any()


@pytest.mark.parametrize(
    "case", [case for case in POLICY if case.name.split()[0] in (*PLAIN, "policy")], ids=lambda case: case.name
)
def test_an_advantage_of_zero_is_all_it_takes_where_nothing_else_trains(case: Case) -> None:
    batch, _ = case.make(1)
    batch = silenced(batch, 1)
    without = batch.per_sequence((batch.column("advantages") != 0).long()) == 0
    assert without.any()
    assert not without.all()
    expected = torch.zeros_like(without) if case.name == "policy all terms" else without
    assert torch.equal(case.loss.zero_gradient(batch), expected)


@pytest.mark.parametrize(
    "more", [{"kl": {}}, {"kl": {"coefficient": 0.0}}, {"entropy_coefficient": 0.1}], ids=lambda more: next(iter(more))
)
def test_what_trains_or_is_measured_at_every_token_is_computed(more: dict[str, Any]) -> None:
    batch, _ = CASES[0].make(1)
    assert not PolicyLoss.model_validate(more).zero_gradient(silenced(batch, 1)).any()


def test_answers_that_are_imitated_are_computed() -> None:
    batch, _ = CASES[0].make(1)
    batch = replace(batch, token_advantages=torch.zeros(len(batch)))
    zero = PolicyLoss.model_validate({"positive_nll": {"coefficient": 0.1, "threshold": 0.5}}).zero_gradient(batch)
    assert torch.equal(zero, batch.reward <= 0.5)


def learner(model: Any, *updates: Batch, loss: Any, **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor], int]:
    """Return each update, the weights after them, and the number of tokens that the layers were given."""

    async def run() -> tuple[list[Any], dict[str, torch.Tensor], int]:
        config = WorkerConfig(
            model=ModelConfig(path=str(model)),
            learner=LearnerConfig(precision="float64", matmul_precision="highest", max_tokens=200, **settings),
            optimizer=ADAMW,
            steps=10,
        )
        cluster = LocalCluster()
        made = await WorkerLearner.launch(cluster, config)
        own: LearnerWorker = made._group._ranks[0]._link._worker  # type: ignore[attr-defined]
        seen: list[int] = []
        own.model.model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
        try:
            return [await made.update(batch, loss) for batch in updates], weights(own), sum(seen)
        finally:
            await made.close()

    return asyncio.run(run())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=some_groups(VOCABULARY), surrogate=st.sampled_from(PLAIN), equal=st.lists(st.booleans(), min_size=4))
def test_an_update_is_that_of_a_worker_that_computes_everything(llama, groups, surrogate, equal):
    for group, same in zip(groups, equal, strict=False):
        for episode in group.episodes:
            episode.reward = 1.0 if same else episode.reward
    batch = Batch.from_groups(groups).weigh("token")
    assume(bool(batch.trained.any()))
    batch.advantages = GroupAdvantage()(batch).advantages
    batch.rollout_logprobs = torch.full((len(batch),), -3.0)
    loss = PolicyLoss.model_validate({"surrogate": {"ppo": "ppo_clip"}.get(surrogate, surrogate)})
    everything = worker(llama)
    expected = everything.update(whole(batch), loss)
    (found,), after, _ = learner(llama, batch, loss=loss)
    assert_close(weights(everything), after)
    numbers = found.metrics.result()
    assert numbers["loss"] == pytest.approx(expected.metrics.result()["loss"], abs=1e-6)
    assert numbers["gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-4, abs=1e-9)
    zero = loss.zero_gradient(batch) & (batch.trained_per_sequence > 0)
    assert numbers["learner/zero_gradient"] == int(zero.sum())
    own = batch.trained & zero[batch.sequence.clamp(min=0)]
    assert torch.equal(found.logprobs.isnan(), own)
    there = batch.trained & ~own
    torch.testing.assert_close(found.logprobs[there], expected.logprobs[0][there], atol=1e-5, rtol=0)


def half_silent(zero: list[int]) -> Batch:
    batch = some_batch()
    batch.rollout_logprobs = torch.full((len(batch),), -3.0)
    advantages = torch.ones(batch.sequences, dtype=torch.float64)
    advantages[zero] = 0.0
    batch.advantages = batch.per_token(advantages)
    return batch


def test_their_tokens_go_through_no_layer(llama):
    batch = half_silent([3, 4])  # the whole second group
    live, _ = batch.select(torch.tensor([0, 1]))
    _, _, tokens = learner(llama, batch, loss=PolicyLoss())
    assert tokens == len(live)


def test_where_every_gradient_is_zero_the_moments_still_move_the_weights(llama):
    first, second = half_silent([]), half_silent([0, 1, 2, 3, 4])
    everything = worker(llama)
    for batch in (first, second):
        everything.update(whole(batch), PolicyLoss())
    (_, found), after, _ = learner(llama, first, second, loss=PolicyLoss())
    assert_close(weights(everything), after)
    numbers = found.metrics.result()
    assert (numbers["loss"], numbers["gradient_norm"]) == (0.0, 0.0)
    assert numbers["learner/zero_gradient"] == 4
    assert "learner/empty" not in numbers


def test_metrics_are_over_all_trained_tokens(llama):
    batch = half_silent([3, 4])
    (found,), _, _ = learner(llama, batch, loss=PolicyLoss())
    said = torch.where(found.logprobs.isnan(), batch.rollout_logprobs, found.logprobs)
    assert found.metrics.result()["entropy/approximate"] == pytest.approx(-float(said[batch.trained].mean()), rel=1e-6)


def test_everything_is_computed_where_the_tokens_of_experts_are_counted(llama, monkeypatch):
    batch = half_silent([3, 4])
    config = WorkerConfig(
        model=ModelConfig(path=str(llama)), learner=LearnerConfig(balance=0.001), optimizer=ADAMW, steps=10
    )
    made = WorkerLearner(None, config, None)  # type: ignore[arg-type]
    monkeypatch.setattr(WorkerLearner, "_pack", lambda self, batch, zero, sequences, unit: (zero, sequences))
    monkeypatch.setattr(WorkerLearner, "_needed", lambda self, work, backward: 0.0)
    zero, sequences = made._pack_update(batch, PolicyLoss())
    assert not zero.any()
    assert len(sequences) == 4


def test_the_mismatch_is_measured_where_the_learner_computed(llama):
    batch = half_silent([3, 4])
    (found,), _, _ = learner(llama, batch, loss=PolicyLoss())
    numbers = mismatch_metrics(replace(batch, old_logprobs=found.logprobs)).result()
    live = found.logprobs[batch.trained & ~found.logprobs.isnan()].double()
    assert numbers["mismatch/token_mult_prob_error"] == pytest.approx(float((live + 3.0).abs().exp().mean()), rel=1e-5)
    assert all(math.isfinite(value) for value in numbers.values())
    nothing = torch.full_like(found.logprobs, math.nan)
    assert "mismatch/max" not in mismatch_metrics(replace(batch, old_logprobs=nothing)).result()
