"""AdamW by Megatron Core's distributed optimizer: every rank has whole weights and gradients, and the moments of an
equal share of the numbers, which it updates (the first stage of ZeRO, arXiv 1910.02054).

Weights lie in one buffer and gradients in another. The gradients of all micro-batches are added up there, then
reduce-scattered once per step; the updated weights are all-gathered. A rank's share is a range of the buffer, which
begins and ends anywhere in a parameter. So moments are saved and loaded in the pieces into which FSDP cuts them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from whet.base.errors import WhetError
from whet.models.attention.forest import decoder_of
from whet.models.shards import Parameters
from whet.parallel.megatron.parameters import MegatronParameters, shard_dim, stays_whole
from whet.parallel.megatron.stand_ins import OneRank, as_on_a_gpu
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import full_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DistributedAdamW(torch.optim.AdamW):
    """AdamW whose ``param_groups`` and ``state`` are of this rank's shares: flat tensors, each in the memory of a
    parameter. All ranks call each method together."""

    def __init__(
        self,
        made: torch.optim.Optimizer,
        root: nn.Module,
        parameters: Parameters,
        ranks: Ranks,
        tied: nn.Parameter | None = None,
    ) -> None:
        """``made``: AdamW of the trained parameters of ``root``, whose weights are moved into the buffer.
        ``parameters``: the layout of ``root``, which is as ``build_megatron`` has made it. ``tied``: a parameter that
        another stage has too. Raises ``WhetError`` where FSDP would, and for weights that are not float32."""
        super().__init__(made.param_groups)
        assert isinstance(parameters, MegatronParameters)
        self._ranks = ranks
        self._names: dict[Tensor, str] = {
            p: name.removeprefix("model.") for name, p in root.named_parameters() if p.requires_grad
        }
        for parameter, name in self._names.items():
            self._layout(parameter)  # refuses what can't be cut
            if parameter.dtype != torch.float32:
                raise WhetError(
                    f"Megatron Core's distributed optimizer is for weights in float32, but {name} is in "
                    f"{parameter.dtype}; set learner.precision=float32, or leave out learner.distributed_optimizer"
                )
            parameter.allreduce = ".experts." not in name  # type: ignore[attr-defined]  # Megatron Core's mark
        if tied is not None:
            tied.shared_embedding = True  # type: ignore[attr-defined]  # then both stages cut it in the same places
        data, alone = ranks.parameters["shards"].get_group(), OneRank()
        experts = ranks.experts(ranks.config.expert)["copies"].get_group()
        groups: Any = ProcessGroupCollection(dp=data, dp_cp=data, expt_dp=experts, tp=alone, pp=alone, ep=alone)
        self._chunk = DistributedDataParallel(
            decoder_of(root.get_submodule("model")).settings,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            root,
            pg_collection=groups,
        )
        buffers = {0: self._chunk.buffers, 1: self._chunk.expert_parallel_buffers}  # apart, as if of two models
        self._buffers = buffers[0] + buffers[1]
        with as_on_a_gpu():
            settings = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True)
            self._distributed = DistributedOptimizer(
                made, settings, None, None, [self._chunk], buffers, data, None, 0, 0
            )
        of_rank = self._distributed.shard_fp32_groups
        plain = {share: share.detach() for shares in of_rank for share in shares}  # AdamW updates no views of leaves
        for shares in [*of_rank, *(group["params"] for group in made.param_groups)]:
            shares[:] = [plain[share] for share in shares]
        self.param_groups, self.state = made.param_groups, made.state
        of_groups = zip(self._distributed.model_fp32_groups, of_rank, strict=True)
        self._shares: dict[Tensor, Tensor] = {
            parameter: share for group in of_groups for parameter, share in zip(*group, strict=True)
        }
        parameters.buffers = self
        self.zero_grad()

    # Gradients

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up the gradients of backward passes, which are then the parameters' ``grad``, on this rank."""
        for buffer in self._buffers:
            buffer.grad_data.untyped_storage().resize_(buffer.grad_data.numel() * buffer.grad_data.itemsize)
        self._chunk.zero_grad_buffer()
        yield
        for parameter in self._names:
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]

    def reduce_scatter(self) -> None:
        """Sum this rank's share of the gradients over all data, and set the rest to zero."""
        self._chunk.finish_grad_sync()
        for buffer in self._buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                for rank, part in enumerate(bucket.grad_data.chunk(group.size())):
                    if rank != group.rank():
                        part.zero_()
                    elif self._ranks.config.replicas > 1:
                        dist.all_reduce(part, group=self._ranks.parameters["replicas"].get_group())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        super().zero_grad()
        for parameter in self._names:
            parameter.grad = None
        for buffer in self._buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's share and gather the weights."""
        self._distributed.prepare_grads()
        self._distributed.step_with_ready_grads()

    # State

    def empty_state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a whole parameter's moments and number of steps before the first step, sharded as FSDP does."""
        moments = {kind: self._piece(parameter, torch.zeros_like(parameter)) for kind in _MOMENTS}
        return {"step": torch.zeros((), device=parameter.device), **moments}

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a whole parameter's state, sharded as FSDP does; nothing before the first step, or if it isn't
        trained."""
        if parameter not in self._names:
            return {}
        group = self._layout(parameter)[0].get_group()
        device = self._ranks.device
        # a rank may have no share of it
        step = next((state["step"].to(device, copy=True) for state in self.state.values() if state), None)
        step = torch.full((), -1.0, device=device) if step is None else step
        dist.all_reduce(step, dist.ReduceOp.MAX, group=group)
        if step < 0:
            return {}
        moments = {}
        for kind in _MOMENTS:
            whole = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
            if (part := self._part(parameter, whole)) is not None:
                part.copy_(self.state[self._shares[parameter]][kind])
            dist.all_reduce(whole.view(torch.int32), group=group)  # sums of integers, and so of bits, are exact
            moments[kind] = self._piece(parameter, whole)
        return {"step": step, **moments}

    def set_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Set what ``state_of`` has returned on each rank."""
        for kind in _MOMENTS:
            whole = full_tensor(state[kind], self._ranks.device)
            if (part := self._part(parameter, whole)) is not None:
                self.state[self._shares[parameter]][kind] = part.clone()
        if parameter in self._shares:
            self.state[self._shares[parameter]]["step"] = state["step"].clone()

    def _part(self, parameter: Tensor, whole: Tensor) -> Tensor | None:
        """Return this rank's share of a tensor of a parameter's shape, if there is one."""
        if (share := self._shares.get(parameter)) is None:
            return None
        start = share.storage_offset() - parameter.storage_offset()
        return whole.view(-1)[start : start + share.numel()]

    def _piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        mesh, placement = self._layout(parameter)
        if placement is None:
            return whole
        return distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None).clone()

    def _layout(self, parameter: Tensor) -> tuple[DeviceMesh, Shard | None]:
        """Return the ranks that share the updates of a parameter, and how FSDP would shard it over them."""
        name, ranks = self._names[parameter], self._ranks
        mesh = ranks.experts(ranks.config.expert)["copies"] if ".experts." in name else ranks.parameters["shards"]
        return mesh, None if stays_whole(name) else Shard(shard_dim(name, parameter, mesh.size()))
