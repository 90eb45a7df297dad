"""One rank of a learner of any size, alone in a process: torch's fake process groups stand in for the others, and what
is built has no memory. So the real ``parallelize`` runs for a layout of thousands of ranks, and says what each of them
will hold. Knows no model.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from whet.cluster.base import Seat
from whet.errors import WhetError
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import Ranks, T, arrange


class AloneRanks(Ranks):
    """Ranks of which only this one is there."""

    def first(self, value: T) -> T:
        return value

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        yield


@contextmanager
def rehearsal(config: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Be ``rank`` of a learner on the device ``meta``. Raises ``WhetError`` in a process that is one of several ranks
    already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise WhetError("this process is one of several ranks already, and can't rehearse others")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.ranks)
    try:
        each = config.ranks_per_shard
        seat = Seat(rank or 1, config.ranks, rank // each, config.ranks // each)  # the first would read the weights
        everybody = dist.group.WORLD
        assert everybody is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield arrange(
                AloneRanks, config, seat, torch.device("meta"), everybody, everybody, True, timedelta(minutes=1)
            )
    finally:
        dist.destroy_process_group()


@dataclass(slots=True, frozen=True)
class Piece:
    """What is known of a parameter once it was spread."""

    shape: tuple[int, ...]
    bytes_each: int  # of one number
    trains: bool
    sizes: tuple[int, ...]  # of the mesh that it is spread over
    dimensions: tuple[str, ...]  # their names
    placements: tuple[object, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> "Piece":
        own = (tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        if not isinstance(parameter, DTensor):
            return cls(*own, (), (), ())
        mesh = parameter.device_mesh
        return cls(*own, tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), tuple(parameter.placements))

    def numbers(self, config: ParallelConfig, rank: int) -> int:
        """How many of its numbers this rank holds."""
        tensor, shard = rank % config.tensor, rank // config.tensor // config.pipeline
        shards = config.fsdp * config.context
        own = shard % shards * config.tensor + tensor  # among the ranks of a replica that have the same layers
        parts = self.sizes[self.dimensions.index("expert")] if "expert" in self.dimensions else 1
        here = {
            "replicas": shard // shards,
            "shards": shard % shards,
            "tensor": tensor,
            "copies": own // parts,
            "expert": own % parts,
        }
        return _numbers(self.shape, self.sizes, tuple(here[name] for name in self.dimensions), self.placements)


@cache
def _numbers(
    shape: tuple[int, ...], sizes: tuple[int, ...], here: tuple[int, ...], placements: tuple[object, ...]
) -> int:
    local, _ = _compute_local_shape_and_global_offset(shape, sizes, list(here), placements)  # type: ignore[arg-type]
    return math.prod(local)
