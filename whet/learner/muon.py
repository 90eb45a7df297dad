"""Muon (arXiv 2502.16982): each update of a hidden matrix, also of each expert's, is made orthogonal; all other
parameters have AdamW."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from whet.parallel.parameters import full_tensor, local, part_of


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with common ``param_groups`` and ``state``."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class ShardedMuon(torch.optim.Optimizer):
    """Muon on matrices [m, n] that are sharded over ranks, as in the paper, and on fused experts [experts, m, n], which
    have a matrix each. Momentum is sharded like the parameters; each update is gathered, made orthogonal on every rank,
    and of the result each rank keeps its part. Experts that are whole on a rank are updated there. All ranks step
    together."""

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        """``settings``: as of torch's Muon."""
        like = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **settings)
        super().__init__(groups, like.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(_local_step(p, update, group).to(p.device))


def _local_step(parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return what is added to this rank's part of a parameter, for its update, which is sharded like it."""
    if not isinstance(update, DTensor):
        return _orthogonal_step(update, group)
    device = torch.device(update.device_mesh.device_type)  # offloaded parameters lie elsewhere
    if update.dim() == 2:
        return part_of(parameter, _orthogonal_step(full_tensor(update, device), group))
    matrices: DTensor = update.to(device)  # type: ignore[assignment]
    cuts = [Replicate() if getattr(cut, "dim", 0) else cut for cut in matrices.placements]  # only the experts
    steps = _orthogonal_step(matrices.redistribute(placements=cuts).to_local(), group)
    whole = DTensor.from_local(
        steps, matrices.device_mesh, cuts, run_check=False, shape=update.shape, stride=update.stride()
    )
    return whole.redistribute(placements=update.placements).to_local()


def _orthogonal_step(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return what torch's Muon adds to a whole matrix for an update, or to each of several matrices."""
    matrices = []
    for each in update if update.dim() == 3 else [update]:
        matrices.append(nn.Parameter(torch.zeros_like(each)))
        matrices[-1].grad = each
    settings = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return torch.stack([matrix.detach() for matrix in matrices]).view_as(update)


def build_muon(
    groups: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    others: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return Muon for the ``groups`` that are ``hidden``, and the optimizer that ``others`` makes for the others. Its
    updates are scaled to the size of AdamW's, so that one learning rate suits both."""
    hidden = [group for group in groups if group.pop("hidden", False)]
    rest = [group for group in groups if not any(group is chosen for chosen in hidden)]
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        plain = all(p.dim() == 2 and not isinstance(p, DTensor) for group in hidden for p in group["params"])
        kind: Any = torch.optim.Muon if plain else ShardedMuon
        parts.append(kind(hidden, **{"adjust_lr_fn": "match_rms_adamw", **settings}))
    if rest:
        parts.append(others(rest))
    return Several(parts)
