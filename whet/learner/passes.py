"""Forward and backward passes of micro-batches: one after the other or, if layers are distributed over ranks, through
the stages of a pipeline, which all get the last stage's results. And the measurement of a step over all ranks."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.progress import PROGRESS
from whet.base.seeds import derive_seed
from whet.core.batch import Batch, ModelOutput, Output
from whet.core.packing import idle
from whet.learner.base import Top
from whet.learner.model import LearnerModel
from whet.learner.optimizer import gradient_norm
from whet.models.stages import StageInput
from whet.parallel.fsdp import set_last_backward
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import squared_norm
from whet.processes.compute import COMPUTE


def forward(
    model: LearnerModel, batches: Sequence[Batch], outputs: Set[Output], top: Top | None = None
) -> list[ModelOutput]:
    """Return the model's outputs for each batch, on the CPU; see ``LearnerModel.forward``. No gradient flows."""
    results: dict[int, ModelOutput] = {}

    def run(number: int, batch: Batch, stage_input: StageInput | None = None) -> Tensor:
        output = model(batch, outputs, top, stage_input)
        if isinstance(output, Tensor):
            return output
        results[number] = output
        return torch.zeros(())

    if model.pipeline is None:
        for number, batch in enumerate(PROGRESS.each(batches, "micro-batches")):
            COMPUTE.yield_to_decoder()
            run(number, batch)
        results = {number: _on_cpu(output) for number, output in results.items()}  # at the end: it waits for the device
    else:
        full = _full(model.pipeline.micro_batches(len(batches)), batches)
        lengths = [len(batch) for batch in full]
        model.pipeline.run(lambda number, stage_input: run(number, full[number], stage_input), lengths, backward=False)
        results = model.pipeline.from_last({number: _on_cpu(output) for number, output in results.items()})
    return [results[number] for number in range(len(batches))]


def forward_backward(
    model: LearnerModel,
    batches: Sequence[Batch],
    outputs: Set[Output],
    loss: Callable[[int, ModelOutput], Tensor],
) -> None:
    """Accumulate gradients. ``loss(number, output)`` is called for each batch on the rank with the head."""

    def run(number: int, batch: Batch, stage_input: StageInput | None = None) -> Tensor:
        output = model(batch, outputs, stage_input=stage_input)
        if isinstance(output, Tensor):
            return output
        if number < len(batches):
            return loss(number, output)
        return sum((column.sum() for column in output.columns().values()), torch.zeros(()))  # zeros

    parameters = model.shards.parameters
    if model.pipeline is None:
        with parameters.accumulating():
            for number, batch in enumerate(PROGRESS.each(batches, "micro-batches")):
                COMPUTE.yield_to_decoder()
                set_last_backward(model, number == len(batches) - 1)
                run(number, batch).backward()
        parameters.sum_gradients(model.by_name())
        return
    full = _full(model.pipeline.micro_batches(len(batches)), batches)

    def stage(number: int, stage_input: StageInput) -> Tensor:
        output = run(number, full[number], stage_input)
        if output.requires_grad:  # a stage's last backward pass is the last micro-batch's
            output.register_hook(lambda _: set_last_backward(model, number == len(full) - 1))
        return output

    with parameters.accumulating():
        model.pipeline.run(stage, [len(batch) for batch in full], backward=True)
    model.pipeline.sum_tied()
    parameters.sum_gradients(model.by_name())


def measure(model: LearnerModel, total: Tensor, ranks: Ranks | None) -> tuple[float, float, float]:
    """Return the loss of this shard of the data, which is ``total``, the loss of the whole step, and the norm of its
    gradient. The latter two are bit-identical on every rank, so that all ranks decide alike."""
    if ranks is None:
        loss, norm = torch.stack([total.double(), gradient_norm(model.parameters()).double()]).tolist()
        return loss, loss, norm
    parts = model.shards.parameters.gradients
    owned = ((name, p) for name, p in model.owned_parameters() if p.grad is not None)
    gradients = [part for name, parameter in owned for part in parts(name, parameter).values()]
    squares = squared_norm(gradients, ranks.info.ranks // ranks.config.pipeline).to(ranks.device)
    loss, squared = ranks.sum(torch.stack([total / ranks.config.ranks_per_shard, squares])).tolist()
    return float(total), loss, math.sqrt(squared) if squared >= 0 else math.nan


def _on_cpu(output: ModelOutput) -> ModelOutput:
    return replace(output, **{name: column.cpu() for name, column in output.columns().items()})


def _full(count: int, batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches, padded with batches without trained tokens to the number that the schedule needs."""
    return [*batches, *[idle(batches[-1])] * (count - len(batches))]


@contextmanager
def seeded_dropout(model: LearnerModel, seed: int, shard: int, step: int) -> Iterator[None]:
    """Make dropout, if a model has it, a function of the seed and the step, independent of previous computations."""
    hf: Any = model.model.config
    drops = bool(getattr(hf.get_text_config(), "attention_dropout", 0.0)) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.model.modules()
    )
    with torch.random.fork_rng() if drops else nullcontext():
        if drops:
            stage = [] if model.pipeline is None else [model.pipeline.local_stages[0].index]
            torch.manual_seed(derive_seed("dropout", seed, shard, step, *stage))
        yield
