"""What the ranks of a pipeline hold: those of the first stage the embeddings and the most activations, those of the
last one the head."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from whet.models.stages import cut_layers
from whet.plan.model import ModelSize

if TYPE_CHECKING:
    from whet.parallel.config import ParallelConfig


@dataclass(slots=True, frozen=True)
class StageSize:
    """One kind of rank."""

    name: str  # how it goes on after "each rank"
    rank: int  # its place in the pipeline
    size: ModelSize  # of what it holds
    activations: Fraction  # that it keeps, as a share of those of one micro-batch in the whole model
    borders: int  # over which hidden states, or their gradients, come to it


def stage_sizes(size: ModelSize, parallel: "ParallelConfig", micro_batches: int) -> Iterator[StageSize]:
    """Of the ranks with the first stage, of those in between, and of those with the last; of all of them where there is
    no pipeline. ``micro_batches`` of a step pass through it."""
    ranks = parallel.pipeline
    if ranks == 1:
        yield StageSize("", 0, size, Fraction(1), 0)
        return
    names = {0: ", first stage", 1: ", stages between", ranks - 1: ", last stage"}
    cut = cut_layers(size.layers, parallel.stages)
    for rank, name in sorted(names.items()):
        layers = sum(map(len, cut[rank::ranks]))
        # How many micro-batches a rank has begun and not ended: 1F1B, or what torch's interleaved schedule begins with.
        begun = Fraction(ranks - rank)
        if (rounds := parallel.stages_per_rank) > 1:
            begun = Fraction((rounds - 1) * ranks + 2 * (ranks - 1 - rank) + 1, rounds)
        begun = min(begun, Fraction(micro_batches))
        first, last = rank == 0, rank == ranks - 1
        part, kept = _part(size, layers, first, last), begun * layers / size.layers
        yield StageSize(name, rank, part, kept, 2 * parallel.stages_per_rank - first - last)


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
