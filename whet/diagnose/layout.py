"""Simulates one rank of a learner of any size in a single process. torch's fake process groups replace the other ranks
and the model has no memory, so the real ``parallelize`` can shard it for a layout of thousands of ranks. Layouts that
torch or ``whet.parallel`` refuse are refused here too, except if it depends on the weights' values.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.base.errors import WhetError
from whet.cluster.base import RankInfo
from whet.learner.config import Precision
from whet.learner.model import build_whole
from whet.models.config import ModelConfig
from whet.models.quantized import quantized_layers
from whet.models.stages import cut_layers
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import Ranks, T, arrange
from whet.parallel.parallelize import parallelize
from whet.parallel.parameters import local


@dataclass(slots=True, frozen=True)
class Shard:
    """The part of a model's parameters on one rank."""

    weights: int  # bytes
    trained: int  # numbers
    updated: int  # numbers of these that this rank updates
    quantized: int = 0  # numbers in 4 bits
    restored: int = 0  # numbers in the largest of these matrices, which is computed with in full


def lay_out(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    *,
    train: bool,
    value_head: bool = False,
    rank: int = 0,
    whole: bool = False,
) -> Shard:
    """Shard the model as ``rank`` does and count its part. ``whole``: ranks with other data or tokens shard only the
    updates, as the distributed optimizer does. Needs only the model's config file. Raises ``WhetError`` if
    the model can't be sharded that way. If the shards are uneven, the first ranks have the largest."""
    with rehearsal(parallel, rank) as ranks:
        build = partial(build_whole, model, precision, train, value_head, 0)
        scorer, _ = parallelize(build, ranks, bfloat16=precision == "bfloat16", trains=train)
        parameters = list(scorer.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        layers = [(local(layer.packed), local(layer.scales)) for layer in quantized_layers(scorer).values()]
        numbers = [2 * packed.numel() for packed, _ in layers]
        count = _before_fsdp if whole else _numbers
    return Shard(
        sum(count(parameter) * parameter.element_size() for parameter in parameters)
        + sum(packed.nbytes + scales.nbytes for packed, scales in layers),
        sum(count(parameter) for parameter in trained),
        sum(_numbers(parameter) for parameter in trained),
        sum(numbers),
        max(numbers, default=0),
    )


def _numbers(parameter: Tensor) -> int:
    return local(parameter).numel()


def _before_fsdp(parameter: Tensor) -> int:
    """Return the numbers of a parameter that a rank would have if FSDP had not sharded it."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    cuts = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    others = (size for name, size, cut in cuts if name not in ("shards", "copies") and not cut.is_replicate())
    return parameter.numel() // math.prod(others)


@contextmanager
def rehearsal(config: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Act as ``rank`` of a learner on the device ``meta``. Raises ``WhetError`` in a process that already is one of
    several ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise WhetError("this process is one of several ranks and can't simulate others; use another process")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.ranks)
    try:
        each = config.ranks_per_shard
        info = RankInfo(rank or 1, config.ranks, rank // each, config.ranks // each)  # rank 0 would read the weights
        world = dist.group.WORLD
        assert world is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield arrange(_Alone, config, info, torch.device("meta"), world, world, True, timedelta(minutes=1))
    finally:
        dist.destroy_process_group()


class _Alone(Ranks):
    """Ranks of which only the simulated one exists."""

    def broadcast(self, value: T) -> T:
        return value

    @contextmanager
    def fail_together(self, doing: str) -> Iterator[None]:
        yield


@dataclass(slots=True, frozen=True)
class Stage:
    """One kind of rank in a pipeline; without a pipeline, the only kind."""

    name: str = ""  # appended to "each rank"
    rank: int = 0  # the first rank of this kind
    first: bool = True  # has the embeddings
    last: bool = True  # has the head
    share: Fraction = Fraction(1)  # maximal saved activations, relative to one micro-batch through the whole model
    borders: int = 0  # connections over which it receives hidden states or their gradients


def stages(layers: int, parallel: ParallelConfig, micro_batches: int) -> Iterator[Stage]:
    """Yield the kinds of ranks: with the first stage, in between, and with the last stage. ``micro_batches`` of a step
    pass through the pipeline."""
    ranks, rounds = parallel.pipeline, parallel.stages_per_rank
    if ranks == 1:
        yield Stage()
        return
    cut = cut_layers(layers, parallel.stages)
    for rank, name in sorted({0: ", first stage", 1: ", stages between", ranks - 1: ", last stage"}.items()):
        # Micro-batches in flight on a rank: of 1F1B, or of the warm-up of torch's interleaved schedule.
        in_flight = Fraction(ranks - rank)
        if rounds > 1:
            in_flight = Fraction((rounds - 1) * ranks + 2 * (ranks - 1 - rank) + 1, rounds)
        own_layers = sum(map(len, cut[rank::ranks]))
        first, last = rank == 0, rank == ranks - 1
        share = min(in_flight, Fraction(micro_batches)) * own_layers / layers
        yield Stage(name, rank * parallel.tensor, first, last, share, 2 * rounds - first - last)
