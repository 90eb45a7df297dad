"""Fully sharded data parallelism (FSDP2; arXiv 2304.11277): each rank keeps a part of every parameter and gathers a
layer at a time. Gradients are summed over the ranks, never averaged: a token's weight is its share of the whole step.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from whet.parallel.experts import placement
from whet.parallel.mesh import Ranks


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    *,
    narrow: bool,
    trains: bool,
    apart: Iterable[tuple[nn.Module, DeviceMesh]] = (),
) -> None:
    """Shard each of ``layers``, then what is left of ``root``, in place. The way in must be ``root``'s forward pass.
    Parts of layers that are ``apart`` are sharded first, over a mesh of their own.

    ``narrow``: layers are gathered in bfloat16, for autocast would round their matrices to it anyway; gradients are
    summed in the parameters' own type. The rest (embeddings, head) is gathered as it is.
    """
    offload = OffloadPolicy()
    if ranks.config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    layer_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for part, mesh in (*apart, *((layer, ranks.data) for layer in layers)):
        fully_shard(
            part,
            mesh=mesh,
            shard_placement_fn=partial(placement, shards=mesh.size(-1)),
            mp_policy=layer_policy if narrow else policy,
            offload_policy=offload,
        )
    fully_shard(root, mesh=ranks.data, reshard_after_forward=not trains, mp_policy=policy, offload_policy=offload)
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_last_backward(root: nn.Module, last: bool) -> None:
    """Before the last of several backward passes of a step: only after it are gradients summed over replicas."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(last)


def reshard(root: nn.Module) -> None:
    """After a forward pass without a backward pass: let go of what was gathered."""
    for module in _sharded(root):
        module.reshard()


def _sharded(root: nn.Module) -> Iterator[FSDPModule]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module
