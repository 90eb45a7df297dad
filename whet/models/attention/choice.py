"""The choice of the attention implementation, by device, precision and model, with a trial at the start of a run."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from whet.base.errors import ConfigError
from whet.models.attention.dense import AttentionSettings
from whet.models.attention.flex import FlexLayout
from whet.models.attention.varlen import VarlenLayout
from whet.models.config import AttentionKernel, AttentionName
from whet.models.layer_heads import largest_heads
from whet.models.shards import Tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_KERNELS: dict[AttentionKernel, str] = {"varlen": "FlashAttention", "flex": "FlexAttention"}
"""The kernels that ``auto`` tries, in order: the first needs no compilation."""


def choose_attention(
    requested: AttentionName, model: nn.Module, device: torch.device, *, half: bool, spread: bool
) -> AttentionKernel:
    """Return the implementation for a model that computes on ``device``, in ``half`` precision or not. ``spread``: a
    batch's tokens are distributed over several ranks. Raises ``ConfigError`` if the requested one can't be used."""
    for name in _KERNELS:
        if requested in ("auto", name):
            problem = _problem(name, model, device, half, spread)
            if requested == name and problem is not None:
                raise ConfigError(f"learner.attention = {name}, but {problem}; set learner.attention=auto")
            if requested == name:
                return name
            if device.type == "cuda" and half and problem is None and _works(name, model, device):
                return name
    return "blocks"


def _problem(name: AttentionKernel, model: nn.Module, device: torch.device, half: bool, spread: bool) -> str | None:
    """Return why a kernel can't be used, or None."""
    text, size = _text(model), largest_heads(_text(model)).size
    kind = type(model).__name__
    if getattr(text, "attention_dropout", 0.0) or any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return f"{kind} has dropout in its attention, or sinks"
    if name == "flex":
        if device.type != "cuda":
            return "it has no backward pass on CPUs"
        return "parallel.context distributes a batch's tokens over ranks" if spread else None
    if getattr(text, "attn_logit_softcapping", None) or getattr(text, "v_head_dim", size) != size:
        return f"{kind} has soft caps, or values of another size than its keys"
    if device.type == "cuda" and not half:
        return "its kernel takes bfloat16: set learner.precision=bfloat16"
    if device.type == "cuda" and (size > 256 or size % 8):
        return f"{kind} has heads of size {size}, and its kernel takes multiples of 8 up to 256"
    return None


def _text(model: nn.Module) -> "PretrainedConfig":
    config: Any = model.config
    return config.get_text_config()


def _works(name: AttentionKernel, model: nn.Module, device: torch.device) -> bool:
    """Try a kernel: return whether it runs on this machine, with the results and gradients of plain operations."""
    largest = largest_heads(_text(model))
    heads, shared, size = largest.queries, largest.keys, largest.size
    random = torch.Generator(device).manual_seed(0)
    starts, parents = [0, 100, 190, 250], [-1, 0, 0, -1]
    oracle = FlexLayout.of(starts, parents, 300, device)
    assert oracle is not None
    layout = oracle if name == "flex" else VarlenLayout.of(starts, parents, 300, device, Tokens())
    inputs = [
        torch.randn(1, count, 300, size, generator=random, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, shared, shared)
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    try:
        out = layout.attend(*inputs, AttentionSettings(size**-0.5))  # type: ignore[arg-type, call-arg]
        gradients = torch.autograd.grad(out.sum(), inputs)
    except Exception as error:  # compilers raise errors of any type
        log.warning("learner.attention: %s does not run here, so it is not used: %s", _KERNELS[name], error)
        return False
    key, value = (x.repeat_interleave(heads // shared, 1) for x in wide[1:])
    at = torch.arange(300, device=device)
    sees = (at <= at[:, None]) & (at[:, None] < oracle.end[:300])
    plain = nn.functional.scaled_dot_product_attention(wide[0], key, value, sees, scale=size**-0.5).transpose(1, 2)
    right = [plain, *torch.autograd.grad(plain.sum(), wide)]
    pairs = zip([out.detach(), *gradients], [x.detach() for x in right], strict=True)
    off = [float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-9)) for ours, exact in pairs]
    if max(off) > 0.02:
        log.warning("learner.attention: %s is off by %.2g here, so it is not used", _KERNELS[name], max(off))
    return max(off) <= 0.02
