"""Muon (arXiv 2502.16982): each update of a hidden matrix is made orthogonal; all other parameters have AdamW."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


class ShardedMuon(torch.optim.Muon):
    """Muon on matrices that are sharded over ranks, as in the paper: momentum is sharded like them; each update is
    gathered, made orthogonal on every rank, and of the result each rank keeps its part. All ranks step together."""

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
                device = torch.device(p.device_mesh.device_type) if isinstance(p, DTensor) else p.device
                step = _orthogonal_step(full_tensor(update, device), group)  # offloaded parameters lie elsewhere
                local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(part_of(p, step).to(p.device))


def _orthogonal_step(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return what torch's Muon adds to a whole matrix for an update."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    settings = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return matrix.detach()


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
        sharded = any(isinstance(p, DTensor) for group in hidden for p in group["params"])
        kind = ShardedMuon if sharded else torch.optim.Muon
        parts.append(kind(hidden, **{"adjust_lr_fn": "match_rms_adamw", **settings}))
    if rest:
        parts.append(others(rest))
    return Several(parts)
