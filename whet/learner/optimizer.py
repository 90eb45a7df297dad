"""AdamW, its learning rate schedule, and the gradient norm."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.extras import extra
from whet.learner.config import OptimizerConfig
from whet.parallel.parameters import local


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0) out of ``steps``. A run that continues beyond ``steps`` stays
    at the minimum.

    Warm-up: lr (step + 1) / warmup_steps. Then the schedule falls from lr at the first step after the warm-up towards
    min_lr_ratio lr, which it would reach at step ``steps`` (linear, or half a cosine: arXiv 1608.03983).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW for the parameters that require a gradient, with weight decay for matrices only. Raises
    ``ConfigError`` if a package is missing."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in sorted((p for p in parameters if p.requires_grad), key=lambda p: p.dim() < 2):
        mesh = getattr(p, "device_mesh", None)  # parameters of one fused update must be sharded over the same ranks
        groups.setdefault((p.dim() >= 2, mesh), []).append(p)
    groups = groups or {(True, None): []}  # a stage of a pipeline may have no layer with an adapter
    decay = {True: config.weight_decay, False: 0.0}
    decaying = [{"params": members, "weight_decay": decay[matrix]} for (matrix, _), members in groups.items()]
    if config.moments == "float32":
        return torch.optim.AdamW(decaying, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    with extra("torchao", "optimizer.moments=8bit"):
        from torchao.optim import AdamW8bit
    eight: torch.optim.Optimizer = AdamW8bit(decaying, lr=config.lr, betas=config.betas, eps=config.eps)
    return eight


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a compiled step reads the tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's moments and number of steps before the first step."""
    p, made = parameter.detach(), optimizer  # type: Tensor, Any
    if isinstance(optimizer, torch.optim.AdamW):
        return {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return {"step": torch.zeros(()), "exp_avg": made._new_buffer(p, True), "exp_avg_sq": made._new_buffer(p, False)}


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments of each parameter that has none. Before the first gradients rather than after them, as the
    optimizer would: so that in the heap they lie together, and not scattered over what activations leave."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = empty_state(optimizer, parameter)


def pieces(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the plain tensors of a parameter's state, as KIND/NAME: an 8-bit moment has two."""
    tensors: dict[str, Tensor] = {}
    for kind, tensor in state.items():
        parts = [part for part in ("codes", "scale") if hasattr(tensor, part)]
        tensors |= {f"{kind}/{part}/{name}": getattr(tensor, part) for part in parts} or {f"{kind}/{name}": tensor}
    return tensors


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm over all gradients, []."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the moments to ``device``; None: to the device of their parameters. Copies from a GPU are asynchronous."""
    for parameter, kinds in optimizer.state.items():
        for kind in kinds.keys() - {"step"}:  # AdamW needs the step count where it is
            kinds[kind] = _moved(kinds[kind], device or parameter.device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy, between a GPU and pinned memory, which torch caches for the next call."""
    if device.type == "cpu" and tensor.device.type == "cuda" and type(tensor) is Tensor:
        host = torch.empty_like(tensor, device=device, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
