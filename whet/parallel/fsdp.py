"""Fully sharded data parallelism (FSDP2; arXiv 2304.11277): each rank keeps a shard of every parameter and gathers one
layer at a time. Gradients are summed over ranks, not averaged: a token's weight is already its share of the step.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from whet.models.precision import autocast_modules
from whet.parallel.experts import placement
from whet.parallel.mesh import Ranks


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    *,
    bfloat16: bool,
    trains: bool,
    own_mesh: Iterable[tuple[nn.Module, DeviceMesh]] = (),
    placement: Callable[[nn.Parameter, int], Shard] = placement,
    whole: Iterable[nn.Parameter] = (),
) -> None:
    """Shard each of ``layers``, then the rest of ``root``, in place. The model must be called through ``root``'s
    forward pass. Modules in ``own_mesh`` are sharded first, over their mesh. ``placement(parameter, ranks)`` is the
    dimension to shard; parameters in ``whole`` are not sharded, nor are their gradients summed.

    With ``bfloat16``, parameters that autocast would round anyway (see ``whet.models.precision``) are gathered in
    bfloat16; gradients are summed in the parameters' dtype. Other parameters (norms, embeddings, head) are gathered
    unchanged.
    """
    offload = OffloadPolicy()
    if ranks.config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    exact_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    rounding = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if bfloat16 else exact_policy
    )

    def cut_over(mesh: DeviceMesh) -> Callable[..., object]:
        return partial(
            fully_shard,
            mesh=mesh,
            shard_placement_fn=lambda parameter: placement(parameter, mesh.size(-1)),
            offload_policy=offload,
            ignored_params=set(whole),
        )

    for part, mesh in (*own_mesh, *((layer, ranks.data) for layer in layers)):
        cut = cut_over(mesh)
        if bfloat16 and (exact := _not_rounded(part)):
            cut(exact, mp_policy=exact_policy)
        if not isinstance(part, FSDPModule):
            cut(part, mp_policy=rounding)
    cut_over(ranks.data)(root, reshard_after_forward=not trains, mp_policy=exact_policy)
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_last_backward(root: nn.Module, last: bool) -> None:
    """Set whether the next backward pass is the last one of a step; gradients are all-reduced over replicas only after
    that."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(last)


def reshard(root: nn.Module) -> None:
    """Free gathered parameters after a forward pass without a backward pass."""
    for module in _sharded(root):
        module.reshard()


def _not_rounded(part: nn.Module) -> list[nn.Module]:
    """Return the unsharded modules whose direct parameters autocast does not round. They are small and form one group.
    A module that also contains matrices includes them."""
    others = {id(module) for module in autocast_modules(part)}
    return [
        module
        for module in part.modules()
        if id(module) not in others
        and not isinstance(module, FSDPModule)
        and any(True for _ in module.parameters(recurse=False))
    ]


def _sharded(root: nn.Module) -> Iterator[FSDPModule]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module
