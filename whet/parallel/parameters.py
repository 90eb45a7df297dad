"""Parameters and gradients that are spread over ranks: one norm, one scale, whole tensors out, whole tensors in."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.parallel.mesh import Ranks


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
