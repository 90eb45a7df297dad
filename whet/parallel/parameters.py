"""Parameters and gradients that are sharded over ranks: their norm, gathering full tensors, loading full tensors."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.parallel.mesh import Ranks

_ALIGNED = 16  # bytes; a tensor must lie on a multiple of its element's size


@runtime_checkable
class StateInShares(Protocol):
    """An optimizer that doesn't keep the state of a parameter under it. All ranks call each method together, for the
    same parameters in the same order."""

    def empty_state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before the first step; each tensor is whole or sharded."""
        ...

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state; empty before the first step."""
        ...

    def set_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Set what ``state_of`` has returned."""
        ...


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Gather the full tensor on every rank. Collective: every rank must call it, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    spread: DTensor = tensor.to(device)  # type: ignore[assignment]
    for done in range(1, spread.device_mesh.ndim + 1):  # one mesh dimension after the other, in the order of sharding
        spread = spread.redistribute(placements=[*[Replicate()] * done, *spread.placements[done:]])
    return spread.to_local()


def full_tensors(tensors: Sequence[Tensor], device: torch.device, everywhere: bool = True) -> Iterator[Tensor]:
    """Yield the full tensors on every rank; if not ``everywhere``, only on rank 0, and tensors on ``meta`` on the other
    ranks. Tensors that are sharded in the same way are gathered in one collective, before the first is yielded, because
    each collective costs a round trip."""
    cuts = [_only_cut(tensor) for tensor in tensors]
    exchanged = {}
    for kind in dict.fromkeys(filter(None, cuts)):
        group = [tensor for tensor, cut in zip(tensors, cuts, strict=True) if cut == kind]
        exchanged[kind] = _exchange(group, *kind, device, everywhere)
    for tensor, cut in zip(tensors, cuts, strict=True):
        full = full_tensor(tensor, device) if cut is None else next(exchanged[cut])
        yield full if everywhere or dist.get_rank() == 0 else torch.empty_like(full, device="meta")


def _only_cut(tensor: Tensor) -> tuple[DeviceMesh, int] | None:
    """Return the only mesh dimension along which a tensor is sharded; None if it is not sharded, or in another way."""
    if not isinstance(tensor, DTensor):
        return None
    cut = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return (tensor.device_mesh, cut[0]) if len(cut) == 1 and type(tensor.placements[cut[0]]) is Shard else None


def _exchange(
    tensors: Sequence[Any], mesh: DeviceMesh, number: int, device: torch.device, everywhere: bool
) -> Iterator[Tensor]:
    """Gather the full tensors in one collective over each rank's bytes."""
    group, ranks, boxes, size = mesh.get_group(number), mesh.size(number), [], 0
    for tensor in tensors:
        dim = tensor.placements[number].dim
        shape = list(tensor.shape)
        shape[dim] = -(-shape[dim] // ranks)  # the last ranks may have less
        boxes.append((tensor, dim, shape, size))
        size += -(-math.prod(shape) * tensor.dtype.itemsize // _ALIGNED) * _ALIGNED
    first = 0 in dist.get_process_group_ranks(group)
    if not everywhere and not (first and mesh.get_local_rank(number) == 0):
        if first:
            dist.gather(_packed(boxes, size, device), group=group, group_dst=0)
        return (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors)
    packed = _packed(boxes, size, device)
    gathered = list(torch.empty(ranks * size, dtype=torch.uint8, device=device).chunk(ranks))
    if everywhere:
        dist.all_gather(gathered, packed, group=group)
    else:
        dist.gather(packed, gathered, group=group, group_dst=0)
    return (
        torch.cat([_box(memory, tensor, shape, offset) for memory in gathered], dim).narrow(dim, 0, tensor.shape[dim])
        for tensor, dim, shape, offset in boxes
    )


def _packed(boxes: Sequence[tuple[Any, int, list[int], int]], size: int, device: torch.device) -> Tensor:
    """Pack this rank's part of each tensor into its box, [size] uint8."""
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    for tensor, dim, shape, offset in boxes:
        part = local(tensor)
        _box(memory, tensor, shape, offset).narrow(dim, 0, part.shape[dim]).copy_(part)
    return memory


def _box(memory: Tensor, tensor: Tensor, shape: list[int], offset: int) -> Tensor:
    """Return the view for a rank's part of a tensor, padded to the same shape on all ranks."""
    return memory[offset : offset + math.prod(shape) * tensor.dtype.itemsize].view(tensor.dtype).view(shape)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that belong to a module's state, by name, such as biases of routers."""
    for inside, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{inside}.{name}" if inside else name, buffer


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose tensor has a nan or an infinity in its part on this rank."""
    return next((name for name, tensor in named if not _is_finite(local(tensor))), None)


def _is_finite(part: Tensor) -> bool:
    if not part.is_floating_point() or not part.numel():
        return True
    return bool(torch.linalg.vector_norm(part, math.inf).isfinite())  # takes no memory, as part.isfinite() would


def squared_norm(gradients: Iterable[Tensor], ranks: int) -> Tensor:
    """Return this rank's share, [] float64, of the squared Euclidean norm of all gradients; the shares of all ``ranks``
    sum to it. A piece that several ranks hold counts on each of them in part."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        pieces = 1
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                pieces *= 1 if placement.is_replicate() else size
        part = local(gradient)
        total = total.to(part.device) + part.double().square().sum() * pieces / ranks
    return total


def copy_from_first(target: nn.Module, source: nn.Module | None, ranks: Ranks) -> None:
    """Fill a sharded module's parameters and buffers from rank 0's unsharded ``source``; on other ranks it is None. One
    tensor at a time is broadcast; ranks without a part of it discard it."""
    full, sharded = dict(_tensors(source)) if source is not None else {}, dict(_tensors(target))
    for name, shape, dtype in ranks.broadcast([(name, tensor.shape, tensor.dtype) for name, tensor in full.items()]):
        moving = torch.empty(shape, dtype=dtype, device=ranks.device)
        if source is not None:
            moving.copy_(full[name])
        dist.broadcast(moving, src=0)
        if name not in sharded:
            continue
        copy_part(sharded[name], moving)


def copy_part(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole`` into a tensor that may be sharded."""
    local(tensor).copy_(part_of(tensor, whole))


def part_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, sharded like ``tensor``, which may not be sharded at all."""
    if not isinstance(tensor, DTensor):
        return whole
    sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))]


@torch.no_grad()
def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield name, tensor.detach()
