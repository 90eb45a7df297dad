"""Full tensors are gathered from their shards, for any sharded dimension and for uneven shards."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.parallel.ranks import on_ranks
from whet.parallel import parameters

CPU = torch.device("cpu")
CASES: list[tuple[list[int], torch.dtype, list[Placement]]] = [
    ([3, 5], torch.float32, [Replicate(), Shard(0)]),  # one of two ranks has one row more
    ([1, 4], torch.bfloat16, [Replicate(), Shard(0)]),  # one rank has no row
    ([7], torch.float64, [Replicate(), Shard(0)]),
    ([4, 3, 2], torch.float32, [Replicate(), Shard(2)]),
    ([2, 5], torch.bfloat16, [Replicate(), Shard(1)]),
    ([6, 2], torch.float32, [Shard(0), Replicate()]),
    ([5, 6], torch.float32, [Shard(0), Shard(1)]),
    ([4], torch.int64, [Replicate(), Replicate()]),
]
EXCHANGES = 2  # one for each mesh dimension over which some tensor is sharded, without the other


def gather(rendezvous: str, rank: int, ranks: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Return (the full tensors, the gathered ones, the number of all-gathers)."""
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2))
    torch.manual_seed(0)
    full = [torch.randn(shape).mul(100).to(dtype) for shape, dtype, _ in CASES]
    spread = [distribute_tensor(tensor, mesh, cut) for tensor, (_, _, cut) in zip(full, CASES, strict=True)]
    original, calls = dist.all_gather, []
    parameters.dist.all_gather = lambda *args, **settings: calls.append(1) or original(*args, **settings)  # type: ignore[func-returns-value]
    gathered = list(parameters.full_tensors([*spread, full[0]], CPU))
    alone = list(parameters.full_tensors([*spread, full[0]], CPU, everywhere=False))
    if rank:
        assert all(tensor.device.type == "meta" for tensor in alone)
        assert [tensor.shape for tensor in alone] == [tensor.shape for tensor in gathered]
    else:
        assert all(torch.equal(first, second) for first, second in zip(alone, gathered, strict=True))
    return [*full, full[0]], gathered, len(calls)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_each_full_tensor(ranks: int) -> None:
    for expected, gathered, exchanges in on_ranks(ranks, gather, ranks):
        assert exchanges == EXCHANGES
        assert len(gathered) == len(expected)
        for tensor, copy in zip(expected, gathered, strict=True):
            assert tensor.dtype == copy.dtype
            assert torch.equal(tensor, copy)
