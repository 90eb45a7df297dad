"""What the ranks of a pipeline hold: those of the first stage the embeddings and the most activations, those of the
last one the head."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from whet.plan.model import ModelSize

if TYPE_CHECKING:
    from whet.parallel.config import ParallelConfig


def stage_sizes(size: ModelSize, parallel: "ParallelConfig") -> Iterator[tuple[str, int, ModelSize, Fraction]]:
    """(what to call it, its place in the pipeline, its part of the model, the activations that it keeps as a share of
    one micro-batch's in the whole model) for the ranks of the first stage, of those in between, and of the last. One
    rank without a name where there is no pipeline."""
    ranks = parallel.pipeline
    if ranks == 1:
        yield "", 0, size, Fraction(1)
        return
    names = {0: ", first stage", 1: ", stages between", ranks - 1: ", last stage"}
    for rank, name in sorted(names.items()):
        layers = sum(_layers(size.layers, index, parallel.stages) for index in range(rank, parallel.stages, ranks))
        # How many micro-batches a rank has begun and not ended: 1F1B, or what torch's interleaved schedule begins with.
        begun = Fraction(ranks - rank)
        if (rounds := parallel.stages_per_rank) > 1:
            begun = Fraction((rounds - 1) * ranks + 2 * (ranks - 1 - rank) + 1, rounds)
        yield name, rank, _part(size, layers, rank == 0, rank == ranks - 1), begun * layers / size.layers


def _part(size: ModelSize, layers: int, first: bool, last: bool) -> ModelSize:
    matrix = size.vocabulary * size.hidden
    share = Fraction(layers, size.layers)
    return replace(
        size,
        parameters=int((size.parameters - size.embedding) * share) + matrix * (first + last),
        experts=int(size.experts * share),
        linear=int(size.linear * share),
        embedding=matrix * (first + last),
        adapters=int(size.adapters * share),
        layers=layers,
        vocabulary=size.vocabulary if last else 0,
    )


def _layers(layers: int, index: int, stages: int) -> int:
    """Of one stage, as ``whet.models.stages`` cuts them."""
    return -(-(index + 1) * layers // stages) - -(-index * layers // stages)
