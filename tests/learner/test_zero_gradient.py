"""Sequences whose gradient is exactly 0 are not computed, and everything stays the number it was."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.groups import groups as some_groups
from tests.learner.parts import ADAMW, VOCABULARY, assert_close, some_batch, weights, whole, worker
from tests.losses.test_zero_gradient import PLAIN
from whet.algorithms.grpo import GroupAdvantage
from whet.cluster.local import LocalCluster
from whet.core.batch import Batch
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.learner.worker import LearnerWorker
from whet.losses.composite import PolicyLoss
from whet.losses.off_policy import mismatch_metrics
from whet.models.config import ModelConfig


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


def test_a_step_that_is_skipped_measures_no_mismatch_of_what_was_not_computed(llama):
    batch = half_silent([3, 4])
    batch.advantages = torch.where(batch.advantages != 0, math.inf, 0.0)
    (found,), _, _ = learner(llama, batch, loss=PolicyLoss())
    assert found.metrics.result()["learner/skipped"] == 1
    whole_batch_computed = worker(llama).score(whole(batch), {"logprobs"})[0]["logprobs"]
    live = batch.trained & (batch.advantages != 0)
    assert torch.equal(found.logprobs.isnan(), batch.trained & ~live)
    expected = mismatch_metrics(replace(batch, trained=live, old_logprobs=whole_batch_computed)).result()
    assert mismatch_metrics(replace(batch, old_logprobs=found.logprobs)).result() == pytest.approx(expected, rel=1e-5)


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
