"""Parameters and gradients that are spread over ranks: one norm, one scale, whole tensors out, whole tensors in."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.parallel.mesh import Ranks

_ALIGNED = 16  # bytes; a tensor must lie on a multiple of its element's size


def local(tensor: Tensor) -> Tensor:
    """The part of it that is on this rank, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """All of it, on every rank. Every rank must ask, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    spread: DTensor = tensor.to(device)  # type: ignore[assignment]
    for done in range(1, spread.device_mesh.ndim + 1):  # one dimension of the mesh after the other, as it was cut
        spread = spread.redistribute(placements=[*[Replicate()] * done, *spread.placements[done:]])
    return spread.to_local()


def in_turn(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """All of each, one after the other, on every rank. Those that are cut alike travel in one exchange, before the
    first one is given out: on a slow network or a busy machine each exchange is a wait."""
    cuts = [_only_cut(tensor) for tensor in tensors]
    exchanged = {}
    for kind in dict.fromkeys(filter(None, cuts)):
        alike = [tensor for tensor, cut in zip(tensors, cuts, strict=True) if cut == kind]
        exchanged[kind] = _exchange(alike, *kind, device)
    for tensor, cut in zip(tensors, cuts, strict=True):
        yield whole(tensor, device) if cut is None else next(exchanged[cut])


def _only_cut(tensor: Tensor) -> tuple[DeviceMesh, int] | None:
    """The one dimension of the mesh along which a tensor is cut; None for what is not cut, or in another way."""
    if not isinstance(tensor, DTensor):
        return None
    cut = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return (tensor.device_mesh, cut[0]) if len(cut) == 1 and type(tensor.placements[cut[0]]) is Shard else None


def _exchange(tensors: Sequence[Any], mesh: DeviceMesh, number: int, device: torch.device) -> Iterator[Tensor]:
    """All of each, after one gathering of the bytes that each rank has of them."""
    ranks, boxes, size = mesh.size(number), [], 0
    for tensor in tensors:
        dim = tensor.placements[number].dim
        shape = list(tensor.shape)
        shape[dim] = -(-shape[dim] // ranks)  # the last ranks may have less
        boxes.append((tensor, dim, shape, size))
        size += -(-math.prod(shape) * tensor.dtype.itemsize // _ALIGNED) * _ALIGNED

    def box(memory: Tensor, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
        return memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    own = torch.empty(size, dtype=torch.uint8, device=device)
    for tensor, dim, shape, offset in boxes:
        part = local(tensor)
        box(own, tensor.dtype, shape, offset).narrow(dim, 0, part.shape[dim]).copy_(part)
    everyones = torch.empty(ranks * size, dtype=torch.uint8, device=device).chunk(ranks)
    dist.all_gather(list(everyones), own, group=mesh.get_group(number))
    return (
        torch.cat([box(one, tensor.dtype, shape, offset) for one in everyones], dim).narrow(dim, 0, tensor.shape[dim])
        for tensor, dim, shape, offset in boxes
    )


def squared_norm(gradients: Iterable[Tensor], ranks: int) -> Tensor:
    """This rank's share, [] float64, of the squared Euclidean norm of all gradients: what ``ranks`` ranks hold between
    them adds up to it. A piece that several ranks hold counts with each of them in part."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        pieces = 1
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                pieces *= 1 if placement.is_replicate() else size
        own = local(gradient)
        total = total.to(own.device) + own.double().square().sum() * pieces / ranks
    return total


def copy_from_first(target: nn.Module, source: nn.Module | None, ranks: Ranks) -> None:
    """Fill a sharded module's parameters and buffers from the first rank's plain one; the others give None. One tensor
    is on its way at a time; a rank that has no part of it lets it go."""
    own, here = dict(_tensors(source)) if source is not None else {}, dict(_tensors(target))
    for name, shape, dtype in ranks.first([(name, tensor.shape, tensor.dtype) for name, tensor in own.items()]):
        moving = torch.empty(shape, dtype=dtype, device=ranks.device)
        if source is not None:
            moving.copy_(own[name])
        dist.broadcast(moving, src=0)
        if name not in here:
            continue
        tensor = here[name]
        if isinstance(tensor, DTensor):
            sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            moving = moving[tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))]
        local(tensor).copy_(moving)


@torch.no_grad()
def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield name, tensor.detach()
