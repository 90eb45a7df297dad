"""A training step with bad data in one shard, between good steps."""

from pathlib import Path
from typing import Any

import torch

from tests.learner.parts import PolicyGradient, assert_close
from tests.parallel.cases import Case, build, full_weights, micro_batches
from whet.core.packing import MicroBatch
from whet.learner.worker import LearnerWorker


def poisoned(case: Case, worker: LearnerWorker, step: int) -> list[MicroBatch]:
    """Return this shard's micro-batches; in the last shard, with non-finite weights."""
    micro = list(micro_batches(case, worker, step))
    if worker.info.shard == worker.info.shards - 1:
        micro[0].batch.share *= float("nan")
    return micro


def skip(rendezvous: str, rank: int, case: Case, dumps: Path) -> Any:
    """Train steps 0 and 1, and between them a step in which only the last shard's data is bad."""
    worker = build(case, rendezvous, rank)
    worker.config = worker.config.model_copy(update={"dumps": dumps})
    worker.update(micro_batches(case, worker, 0), PolicyGradient())
    before = full_weights(worker)
    bad = worker.update(poisoned(case, worker, 9), PolicyGradient())
    kept = all(torch.equal(tensor, before[name]) for name, tensor in full_weights(worker).items())
    worker.update(micro_batches(case, worker, 1), PolicyGradient())
    return bad.skipped, kept, (worker.progress.step, worker.progress.skipped), full_weights(worker)


def assert_skipped(outputs: list[Any], case: Case, tolerance: float = 1e-12) -> None:
    """Assert that ``skip`` returned on each rank the results of a run without the bad step."""
    alone = build(case.one_rank(), "", 0)
    for step in (0, 1):
        alone.update(micro_batches(case.one_rank(), alone, step), PolicyGradient())
    expected = full_weights(alone)
    for skipped, kept, counts, weights in outputs:
        assert "is not finite, so weights and moments stay as they are" in skipped
        assert (kept, counts) == (True, (2, 1))
        assert_close({name: expected[name] for name in weights}, weights, tolerance)
    assert set().union(*(weights for *_, weights in outputs)) == expected.keys()
