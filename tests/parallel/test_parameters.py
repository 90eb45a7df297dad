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
    ([3, 5], torch.float32, [Replicate(), Shard(0)]),  # one rank of two has a row more than the other
    ([1, 4], torch.bfloat16, [Replicate(), Shard(0)]),  # one has nothing
    ([7], torch.float64, [Replicate(), Shard(0)]),
    ([4, 3, 2], torch.float32, [Replicate(), Shard(2)]),
    ([2, 5], torch.bfloat16, [Replicate(), Shard(1)]),
    ([6, 2], torch.float32, [Shard(0), Replicate()]),
    ([5, 6], torch.float32, [Shard(0), Shard(1)]),
    ([4], torch.int64, [Replicate(), Replicate()]),
]
EXCHANGES = 2  # one for each dimension of the mesh that alone cuts a tensor


def gather(rendezvous: str, rank: int, ranks: int) -> tuple[list[Tensor], list[Tensor], int]:
    """(what there was, what came, how many exchanges brought what is cut along one dimension)."""
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2))
    torch.manual_seed(0)
    plain = [torch.randn(shape).mul(100).to(dtype) for shape, dtype, _ in CASES]
    spread = [distribute_tensor(tensor, mesh, cut) for tensor, (_, _, cut) in zip(plain, CASES, strict=True)]
    honest, calls = dist.all_gather, []
    parameters.dist.all_gather = lambda *args, **settings: calls.append(1) or honest(*args, **settings)  # type: ignore[func-returns-value]
    came = list(parameters.full_tensors([*spread, plain[0]], CPU))
    alone = list(parameters.full_tensors([*spread, plain[0]], CPU, everywhere=False))
    if rank:
        assert all(tensor.device.type == "meta" for tensor in alone)
        assert [tensor.shape for tensor in alone] == [tensor.shape for tensor in came]
    else:
        assert all(torch.equal(one, other) for one, other in zip(alone, came, strict=True))
    return [*plain, plain[0]], came, len(calls)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_each_tensor_comes_to_every_rank(ranks: int) -> None:
    for expected, came, exchanges in on_ranks(ranks, gather, ranks):
        assert exchanges == EXCHANGES
        assert len(came) == len(expected)
        for one, other in zip(expected, came, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
