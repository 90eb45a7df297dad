"""Micro-batches through a model: one after the other, or, where its layers are spread over ranks, through the stages of
a pipeline. What the last stage finds is handed to all of them. Knows no loss and no optimizer."""

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from whet.batch import Batch, ModelOutput
from whet.learner.base import Top
from whet.learner.config import Precision
from whet.learner.precision import autocast
from whet.learner.scorer import Scorer
from whet.models.stages import Passage
from whet.packing import idle
from whet.parallel.fsdp import set_last_backward
from whet.processes.compute import COMPUTE


def say(
    scorer: Scorer, batches: Sequence[Batch], outputs: Set[str], precision: Precision, top: Top | None = None
) -> list[dict[str, Tensor]]:
    """What the model says about each batch, on the CPU; see ``Scorer.forward``. No gradient flows."""
    said: dict[int, dict[str, Tensor]] = {}

    def run(number: int, batch: Batch, passage: Passage | None = None) -> Tensor:
        with autocast(precision, batch.tokens.device):
            found = scorer(batch, outputs, top, passage)
        if "hidden" in found:
            hidden: Tensor = found["hidden"]
            return hidden
        said[number] = {name: column.cpu() for name, column in found.items() if column is not None}
        return torch.zeros(())

    if scorer.pipeline is None:
        for number, batch in enumerate(batches):
            COMPUTE.let_turns()
            run(number, batch)
    else:
        full = _full(scorer.pipeline.micro_batches(len(batches)), batches)
        lengths = [len(batch) for batch in full]
        scorer.pipeline.run(lambda number, passage: run(number, full[number], passage), lengths, backward=False)
        said = scorer.pipeline.from_last(said)
    return [said[number] for number in range(len(batches))]


def learn(
    scorer: Scorer,
    batches: Sequence[Batch],
    outputs: Set[str],
    precision: Precision,
    loss: Callable[[int, ModelOutput], Tensor],
) -> None:
    """Forward and backward. ``loss`` is asked, where the head is, about each batch by its number."""

    def run(number: int, batch: Batch, passage: Passage | None = None) -> Tensor:
        with autocast(precision, batch.tokens.device):
            found = scorer(batch, outputs, passage=passage)
        if "hidden" in found:
            hidden: Tensor = found["hidden"]
            return hidden
        if number < len(batches):
            return loss(number, ModelOutput(**found))
        return sum((column.sum() for column in found.values() if column is not None), torch.zeros(()))  # zeros

    if scorer.pipeline is None:
        for number, batch in enumerate(batches):
            COMPUTE.let_turns()
            set_last_backward(scorer, number == len(batches) - 1)
            run(number, batch).backward()
        return
    full = _full(scorer.pipeline.micro_batches(len(batches)), batches)

    def stage(number: int, passage: Passage) -> Tensor:
        output = run(number, full[number], passage)
        if output.requires_grad:  # of one stage's backward passes, the last one is that of the last micro-batch
            output.register_hook(lambda _: set_last_backward(scorer, number == len(full) - 1))
        return output

    scorer.pipeline.run(stage, [len(batch) for batch in full], backward=True)
    scorer.pipeline.sum_tied()


def _full(count: int, batches: Sequence[Batch]) -> list[Batch]:
    """As many as the schedule wants; the last ones train nothing."""
    return [*batches, *[idle(batches[-1])] * (count - len(batches))]
