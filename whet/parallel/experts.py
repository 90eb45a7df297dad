"""Expert parallelism: the experts of a layer are split over ranks that otherwise differ in data, tokens or matrices;
tokens are sent to the experts and back by all-to-all (GShard, arXiv 2006.16668; the layout is torchtitan's).

Within one copy of the model, ``expert`` neighbouring ranks each have a part of every layer's experts. The remaining
dimension, the ``copies`` of an expert, shards its parameters further (FSDP) and sums its gradients. Tensor parallelism
splits no expert: each of its ranks routes its own part of the tokens. Independent of the learner.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from whet.base.errors import WhetError
from whet.models.attention.forest import decoder_of
from whet.models.moe.experts import ADAPTERS, EXCHANGE, Compute, experts_of
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import Ranks


def check_experts(model: nn.Module, config: ParallelConfig) -> bool:
    """Return whether ``model`` has experts. Raises ``WhetError`` if they can't be split as ``config`` says."""
    decoder = decoder_of(model)
    name, experts = type(decoder).__name__, dict(experts_of(decoder))
    if config.expert > 1 and not experts:
        raise WhetError(f"{name} has no experts to split; set parallel.expert to 1")
    for module in experts.values():
        count = next(module.parameters(recurse=False)).shape[0]
        if count % config.expert:
            raise WhetError(
                f"parallel.expert = {config.expert} does not divide the {count} experts of {name}; choose another size"
            )
    if experts and config.tensor > 1 and not config.sequence_parallel:
        raise WhetError(
            f"{name} is a mixture of experts: with parallel.tensor each rank routes its own tokens, so "
            "parallel.sequence_parallel must be true"
        )
    if config.tensor > 1 and any(ADAPTERS in vars(module) for module in experts.values()):
        raise WhetError(
            "model.lora.experts = true adapts experts, whose tokens parallel.tensor splits over ranks, so each rank "
            "would learn a different adapter; set parallel.tensor to 1, or split the experts with parallel.expert"
        )
    return bool(experts)


def routed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the decoder, by name, that process each token on one rank only under tensor parallelism:
    the experts, and sibling modules with parameters (the router)."""
    decoder = decoder_of(model)
    modules = dict(experts_of(decoder))
    for block in {name.replace(".base_layer", "").rpartition(".")[0] for name in modules}:
        for name, module in decoder.get_submodule(block).named_children():
            if any(True for _ in module.parameters(recurse=False)):
                modules[f"{block}.{name}"] = module
    return modules


def spread_experts(model: nn.Module, ranks: Ranks) -> list[tuple[nn.Module, DeviceMesh]]:
    """Split the experts of ``model``, after ``check_experts``, in place. Returns the modules that FSDP must shard over
    other ranks than the rest of their layer, each with its mesh. All ranks must call this, even if their layers have no
    experts."""
    expert, tensor = ranks.config.expert, ranks.config.tensor
    if expert == 1 and tensor == 1:
        return []
    mesh, whole_copy = ranks.experts(expert), ranks.experts(1) if tensor > 1 else None
    copies = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "expert")]
    own_mesh: list[tuple[nn.Module, DeviceMesh]] = []
    experts = {id(module) for _, module in experts_of(model)}
    for module in routed(model).values():
        if id(module) in experts:
            if expert > 1:
                _share(module, mesh["expert"])
            own_mesh.append((module, copies))
        elif whole_copy is not None:
            own_mesh.append((module, whole_copy))
    return own_mesh


def _share(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts, and install the exchange of tokens."""
    count = 0
    for name, parameter in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        count = spread.shape[0]
    vars(module)[EXCHANGE] = AllToAll(mesh.get_group(), count)


def placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension along which FSDP shards a parameter over ``shards`` ranks. If there are fewer experts than
    ranks, each expert is sharded; other parameters are sharded by rows."""
    part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    even = (dim for dim in range(part.ndim) if part.shape[dim] % shards == 0)
    return Shard(next(even, 0) if part.ndim > 2 else 0)


class AllToAll:
    """An ``Exchange`` over the ranks of ``group``, which have equal contiguous parts of the experts."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self.first = group.rank() * (experts // group.size())

    def __call__(self, compute: Compute, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, choices = chosen.shape
        order = chosen.flatten().argsort(stable=True)  # by expert, hence by rank
        send = torch.bincount(chosen.flatten(), minlength=self.experts).view(self.group.size(), -1)
        receive = torch.empty_like(send)  # [ranks, local experts] tokens; ``send`` is [ranks, remote experts]
        dist.all_to_all_single(receive, send, group=self.group)
        sent, received = send.sum(1).tolist(), receive.sum(1).tolist()
        rows = _Move.apply(hidden[order // choices], sent, received, self.group)
        local = torch.arange(receive.shape[1], device=receive.device)
        expert = local.repeat(len(receive)).repeat_interleave(receive.flatten())
        rows = compute(rows, expert[:, None], rows.new_ones(len(expert), 1))
        rows = _Move.apply(rows, received, sent, self.group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return (rows[back].view(tokens, choices, -1) * weights[..., None]).sum(1)


class _Move(torch.autograd.Function):
    """All-to-all of rows sorted by rank: ``sent`` and ``received`` are counts per rank; gradients go the other way. A
    rank that receives no rows takes part as well, and its experts get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (received, sent, group)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Move.apply(grads[0], *ctx.back), None, None, None
