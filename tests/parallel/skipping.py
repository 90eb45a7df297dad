"""A step that is bad for one shard of the data, among steps that are not."""

from pathlib import Path
from typing import Any

import torch

from tests.learner.parts import PolicyGradient, assert_close
from tests.parallel.cases import Case, build, gathered, micro_batches
from whet.core.packing import MicroBatch
from whet.learner.worker import LearnerWorker


def poisoned(case: Case, worker: LearnerWorker, step: int) -> list[MicroBatch]:
    """This shard's micro-batches; in the last shard they have weights that are not finite."""
    micro = micro_batches(case, worker, step)
    if worker.info.shard == worker.info.shards - 1:
        micro[0].batch.weight *= float("nan")
    return micro


def skip(rendezvous: str, rank: int, case: Case, dumps: Path) -> Any:
    """Steps 0 and 1, between them one in which only the last shard's data is bad."""
    worker = build(case, rendezvous, rank)
    worker.config = worker.config.model_copy(update={"dumps": dumps})
    worker.update(micro_batches(case, worker, 0), PolicyGradient())
    before = gathered(worker)
    bad = worker.update(poisoned(case, worker, 9), PolicyGradient())
    kept = all(torch.equal(tensor, before[name]) for name, tensor in gathered(worker).items())
    worker.update(micro_batches(case, worker, 1), PolicyGradient())
    return bad.skipped, kept, (worker.progress.step, worker.progress.skipped), gathered(worker)


def assert_skipped(said: list[Any], case: Case) -> None:
    """Assert that ``skip`` returned on each rank the results of a run without the bad step."""
    alone = build(case.one_rank(), "", 0)
    for step in (0, 1):
        alone.update(micro_batches(case.one_rank(), alone, step), PolicyGradient())
    expected = gathered(alone)
    for skipped, kept, counts, weights in said:
        assert (skipped, kept, counts) == (True, True, (2, 1))
        assert_close({name: expected[name] for name in weights}, weights, 1e-12)
    assert set().union(*(weights for *_, weights in said)) == expected.keys()
