"""What becomes of an optimizer step whose loss or gradient is not finite. It is skipped; its micro-batches are dumped,
so that somebody can find out why (``replay``), and too many such steps in a row end the run. No weight is changed here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.errors import WhetError
from whet.learner.dump import read_dump, write_dump
from whet.learner.optimizer import gradient_norm
from whet.losses.base import Loss
from whet.packing import MicroBatch
from whet.parallel.parameters import local

if TYPE_CHECKING:
    from whet.learner.worker import LearnerWorker


def skip(
    worker: "LearnerWorker", micro_batches: Sequence[MicroBatch], loss: Loss, loss_value: float, norm: float
) -> None:
    """Dump a step that the worker has counted as skipped, before its gradients are gone. Raises ``WhetError`` after
    ``max_skipped_steps`` in a row. Of several ranks all call it together."""
    what = f"the loss ({loss_value})" if not math.isfinite(loss_value) else f"the norm of the gradient ({norm})"
    where = "set a folder for dumps to keep its batch"
    if worker.config.dumps is not None:
        shard = f"-shard-{worker.seat.shard}" if worker.seat.shards > 1 else ""
        folder = worker.config.dumps / f"step-{worker.step:06d}-{worker.skipped:03d}{shard}"
        where = f"its batch is in {folder}"  # on every rank: any of them may be the one that is heard
        not_finite, ranks = first_not_finite(_gradients(worker)), worker.ranks
        if ranks is not None:
            not_finite = next(filter(None, ranks.all(not_finite)), None)
        facts = {
            "what": f"{what} is not finite",
            "step": worker.step,
            "loss": str(loss_value),
            "gradient_norm": str(norm),
            "not_finite": not_finite,
            "settings": repr(loss),
        }
        with ranks.together("writing a dump") if ranks is not None else nullcontext():
            if ranks is None or ranks.speaks_for_shard:
                write_dump(folder, micro_batches, facts)
    if worker.skipped_in_a_row >= worker.config.learner.max_skipped_steps:
        raise WhetError(
            f"{what} was not finite in {worker.skipped_in_a_row} optimizer steps in a row, the last one being step "
            f"{worker.step}; {where}. Lower optimizer.lr, or look at that batch with whet.learner.skipping.replay"
        )


def replay(worker: "LearnerWorker", dump: Path, loss: Loss) -> list[dict[str, Any]]:
    """What each micro-batch of a dump does to the worker's weights as they are now, without changing them: ``loss``,
    ``gradient_norm``, and ``not_finite``, the first parameter whose gradient is not finite (or None)."""
    if worker.ranks is not None:
        raise WhetError("a dump is replayed by one process; it does not depend on how the model was spread")
    results = []
    for micro in read_dump(dump)[0]:
        total, _, _ = worker.accumulate([micro], loss)
        results.append(
            {
                "loss": float(total),
                "gradient_norm": float(gradient_norm([p for _, p in worker.named_parameters()])),
                "not_finite": first_not_finite(_gradients(worker)),
            }
        )
    return results


def first_not_finite(named: Iterator[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor holds a nan or an infinity."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


def _gradients(worker: "LearnerWorker") -> Iterator[tuple[str, Tensor]]:
    """By parameter; of several ranks, the parts that are here."""
    return ((name, local(p.grad)) for name, p in worker.named_parameters() if p.grad is not None)
