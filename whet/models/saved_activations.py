"""Less memory for what a decoder saves for its backward pass, without a second forward pass: norms save their input
only; a feed-forward layer frees the product of its gate until the backward pass computes it again (as Megatron Core
does, arXiv 2205.05198); in mixed precision, weights are rounded again in the backward pass, and matrices that read the
same hidden states share one rounded copy of them.

Outputs are the same to the bit. In bfloat16 gradients differ in rounding: the gradients of a shared copy are summed in
it.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whet.models.attention.forest import decoder_of


def save_fewer_activations(model: nn.Module) -> int:
    """Change the layers of the decoder in place, where they compute what Llama's do; names of parameters stay. Return
    the number of changed modules. Not for layers that are compiled, or recomputed as a whole."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    changed = 0
    for module in decoder_of(model).modules():
        if _computes(module, LlamaRMSNorm):
            _replace_forward(module, _norm)
        elif _computes(module, LlamaMLP) and not any(True for _ in module.act_fn.parameters()):
            _replace_forward(module, _feed_forward)
        elif all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj")):
            module.register_forward_pre_hook(_round_input, with_kwargs=True)
        elif type(module) is nn.Linear:
            _replace_forward(module, _linear)
        else:
            continue
        changed += 1
    return changed


def _computes(module: nn.Module, like: type[nn.Module]) -> bool:
    """Return whether a module has the forward pass of ``like``: transformers copies it into many families."""
    code, expected = (getattr(kind.forward, "__code__", None) for kind in (type(module), like))
    if code is None or expected is None:
        return False
    return bool((code.co_code, code.co_names) == (expected.co_code, expected.co_names))


def _replace_forward(module: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
    setattr(module, "forward", MethodType(function, module))  # noqa: B010


def _rounded(x: Tensor) -> Tensor:
    """Return ``x`` as autocast would give it to a matrix."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _round_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if args:
        return (_rounded(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _rounded(kwargs["hidden_states"])}


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    weight, rounded = module.weight, _rounded(x)
    wide = weight.dtype != rounded.dtype and weight.requires_grad and not hasattr(weight, "placements")
    if not wide or not torch.is_grad_enabled():
        return nn.functional.linear(x, weight, module.bias)
    result: Tensor = _RoundedLinear.apply(rounded, weight, module.bias)
    return result


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    # Left to transformers: a DTensor, of sequence parallelism, which has rules for each operator, and float64, in which
    # runs on several ranks are compared to the last digits.
    plain = hasattr(hidden_states, "placements") or hidden_states.dtype == torch.float64
    if plain or not torch.is_grad_enabled():
        return type(module).forward(module, hidden_states)
    result: Tensor = _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return result


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return type(module).forward(module, x)
    x = _rounded(x)
    gate, up, act = module.gate_proj(x), module.up_proj(x), module.act_fn
    product: Tensor = _GateProduct.apply(gate, up, act)
    result: Tensor = module.down_proj(product)
    if result.requires_grad:
        gate, up = gate.detach(), up.detach()
        _free_until_backward(product.detach(), lambda: act(gate) * up, result)
    return result


def _free_until_backward(saved: Tensor, compute: Callable[[], Tensor], result: Tensor) -> None:
    """Free the memory of ``saved``, and fill it again when the gradient of ``result``, computed from it, arrives."""
    storage = saved.untyped_storage()
    size = storage.nbytes()

    def fill(gradient: Tensor) -> None:
        storage.resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(saved):
            saved.copy_(compute())

    storage.resize_(0)
    result.register_hook(fill)


class _RoundedLinear(torch.autograd.Function):
    """``linear`` as autocast computes it, [..., inputs] -> [..., outputs], but for the rounded weight, which isn't
    kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.dtype
        return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, (to_x, to_weight, to_bias) = gradient.flatten(0, -2), ctx.needs_input_grad
        d_x = (rows @ weight.to(x.dtype)).view_as(x) if to_x else None
        d_weight = (rows.t() @ x.flatten(0, -2)).to(weight.dtype) if to_weight else None
        return d_x, d_weight, rows.sum(0).to(ctx.bias) if to_bias else None


class _RMSNorm(torch.autograd.Function):
    """``weight * (x / rms(x))`` [..., H], the mean of squares in float32 (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(torch.float32) * scale
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (gradient * normed.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
        d_normed = (gradient * weight).to(torch.float32)
        shared = (d_normed * normed).mean(-1, keepdim=True)
        return d_normed.sub_(normed.mul_(shared)).mul_(scale).to(x.dtype), d_weight, None


class _GateProduct(torch.autograd.Function):
    """``act(gate) * up``, elementwise."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.act(gate)
        (d_gate,) = torch.autograd.grad(activated, gate, gradient * up)
        return d_gate, activated.detach().mul_(gradient), None
