"""One rank of a learner of any size, alone in a process. torch's fake process groups stand in for the other ranks and
the model is built without memory, so the real ``parallelize`` cuts it for a layout of thousands of ranks. A layout that
torch or ``whet.parallel`` refuse is refused here too, unless the weights decide it; a rank's parameters are counted.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist

from whet.base.errors import WhetError
from whet.cluster.base import RankInfo
from whet.learner.config import Precision
from whet.learner.model import build_whole
from whet.models.config import ModelConfig
from whet.models.stages import cut_layers
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import Ranks, T, arrange
from whet.parallel.parallelize import parallelize
from whet.parallel.parameters import local


@dataclass(slots=True, frozen=True)
class Held:
    """The part of a model's parameters on one rank."""

    weights: int  # bytes
    trained: int  # numbers


def lay_out(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    *,
    train: bool,
    value_head: bool = False,
    rank: int = 0,
) -> Held:
    """Cut the model as ``rank`` does, and count that rank's part. The model's config file is enough. Raises
    ``WhetError`` where it can't be cut so. Where the parts are uneven, the first ranks hold the most."""
    with rehearsal(parallel, rank) as ranks:
        build = partial(build_whole, model, precision, train, value_head, 0)
        scorer, _ = parallelize(build, ranks, bfloat16=precision == "bfloat16", trains=train)
        parts = [(local(parameter), parameter.requires_grad) for parameter in scorer.parameters()]
    return Held(
        sum(part.numel() * part.element_size() for part, _ in parts),
        sum(part.numel() for part, trains in parts if trains),
    )


@contextmanager
def rehearsal(config: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Be ``rank`` of a learner on the device ``meta``. Raises ``WhetError`` in a process that is one of several ranks
    already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise WhetError("this process is one of several ranks, so it can't stand in for others; use another one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.ranks)
    try:
        each = config.ranks_per_shard
        info = RankInfo(rank or 1, config.ranks, rank // each, config.ranks // each)  # the first would read the weights
        everybody = dist.group.WORLD
        assert everybody is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield arrange(_Alone, config, info, torch.device("meta"), everybody, everybody, True, timedelta(minutes=1))
    finally:
        dist.destroy_process_group()


class _Alone(Ranks):
    """Ranks of which only this one exists."""

    def first(self, value: T) -> T:
        return value

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        yield


@dataclass(slots=True, frozen=True)
class Stage:
    """One kind of rank of a pipeline; of a learner without a pipeline the only one."""

    name: str = ""  # how it goes on after "each rank"
    rank: int = 0  # the first rank of this kind
    first: bool = True  # it has the embeddings
    last: bool = True  # it has the head
    share: Fraction = Fraction(1)  # of one micro-batch's activations in the whole model, that it keeps at most
    borders: int = 0  # over which hidden states, or their gradients, come to it


def stages(layers: int, parallel: ParallelConfig, micro_batches: int) -> Iterator[Stage]:
    """Yield the ranks with the first stage, those in between, and those with the last. ``micro_batches`` of a step
    pass through the pipeline."""
    ranks, rounds = parallel.pipeline, parallel.stages_per_rank
    if ranks == 1:
        yield Stage()
        return
    cut = cut_layers(layers, parallel.stages)
    for rank, name in sorted({0: ", first stage", 1: ", stages between", ranks - 1: ", last stage"}.items()):
        # How many micro-batches a rank has begun and not ended: 1F1B, or what torch's interleaved schedule begins with.
        begun = Fraction(ranks - rank)
        if rounds > 1:
            begun = Fraction((rounds - 1) * ranks + 2 * (ranks - 1 - rank) + 1, rounds)
        own = sum(map(len, cut[rank::ranks]))
        first, last = rank == 0, rank == ranks - 1
        share = min(begun, Fraction(micro_batches)) * own / layers
        yield Stage(name, rank * parallel.tensor, first, last, share, 2 * rounds - first - last)
