"""A number that is not finite never reaches the weights."""

import pytest
import torch

from tests.learner.parts import Poisoned, PolicyGradient, assert_same, cut, some_batch, weights, whole, worker
from whet.base.errors import WhetError
from whet.learner.dump import read_dump
from whet.learner.optimizer_config import OptimizerConfig

pytestmark = pytest.mark.usefixtures("learner_type")


def moments(learner):
    names = {p: name for name, p in learner.module.by_name()}
    return {f"{names[p]}/{k}": v.clone() for p, state in learner.optimizer.state.items() for k, v in state.items()}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_leaves_weights_moments_and_schedule_as_they_were(llama, tmp_path, what):
    learner = worker(llama, dumps=tmp_path)
    learner.update(whole(some_batch()), PolicyGradient())
    before, moments_before = weights(learner), moments(learner)
    update = learner.update(cut(some_batch(), 30), Poisoned(what=what))
    assert update.skipped
    assert (learner.progress.step, learner.progress.skipped) == (1, 1)
    assert_same(before, weights(learner))
    assert_same(moments_before, moments(learner))

    other = worker(llama)
    for _ in range(2):
        other.update(whole(some_batch()), PolicyGradient())
    learner.update(whole(some_batch()), PolicyGradient())
    assert_same(weights(other), weights(learner))


def test_skips_in_a_row_end_the_run_and_say_where_the_batch_is(llama, tmp_path):
    learner = worker(llama, dumps=tmp_path / "dumps", learner={"max_skipped_steps": 2})
    learner.update(whole(some_batch()), Poisoned())
    learner.update(whole(some_batch()), PolicyGradient())
    learner.update(whole(some_batch()), Poisoned())
    with pytest.raises(WhetError, match="2 optimizer steps in a row") as caught:
        learner.update(whole(some_batch()), Poisoned())
    dumps = sorted((tmp_path / "dumps").iterdir())
    assert len(dumps) == 3
    assert str(dumps[-1]) in str(caught.value)


def test_weights_that_a_step_damaged_are_not_saved(llama, tmp_path):
    learner = worker(llama, precision="float32", optimizer=OptimizerConfig(lr=1e39))
    assert not learner.update(whole(some_batch()), PolicyGradient()).skipped
    with pytest.raises(WhetError, match="after optimizer step 1 the weights have NaN or infinite numbers, first in"):
        learner.state.save(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_dump_brings_the_batch_back_and_replays_it(llama, tmp_path):
    learner = worker(llama, dumps=tmp_path)
    batch = some_batch()
    batch.scores = {"correct": torch.tensor([1.0, 0.0, float("nan"), 1.0, 0.0], dtype=torch.float64)}
    batch.fill("mine", torch.arange(batch.sequences), axis="sequence")
    micro = cut(batch, 30)
    learner.update(micro, Poisoned(what="gradient"))
    [folder] = tmp_path.iterdir()
    again, facts = read_dump(folder)
    assert facts["step"] == 0
    assert "gradient" in facts["what"]
    assert facts["not_finite"]
    assert "Poisoned" in facts["settings"] or "gradient" in facts["settings"]
    for a, b in zip(micro, again, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a.batch.group_uids == b.batch.group_uids
        assert a.batch.distribution == b.batch.distribution
        assert torch.equal(a.batch.column("mine"), b.batch.column("mine"))
        assert b.batch.columns["mine"].axis == "sequence"
        for name in ("tokens", "predictor", "weight", "reward", "trained", "rollout_logprobs", "segment_parent"):
            assert torch.equal(getattr(a.batch, name), getattr(b.batch, name)), name
        assert torch.equal(a.batch.scores["correct"].isnan(), b.batch.scores["correct"].isnan())

    before = weights(learner)
    bad = learner.replay(folder, Poisoned(what="gradient"))
    good = learner.replay(folder, PolicyGradient())
    assert all(one["not_finite"] for one in bad)
    assert [one["not_finite"] for one in good] == [None] * len(micro)
    assert_same(before, weights(learner))


def test_a_folder_without_a_dump_is_refused(tmp_path):
    with pytest.raises(WhetError, match="has no dump"):
        read_dump(tmp_path)
