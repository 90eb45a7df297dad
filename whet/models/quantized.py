"""Linear layers of a frozen model in 4 bits, for LoRA on top of them (QLoRA, arXiv 2305.14314): each weight is one of
the 16 levels of NormalFloat (NF4), times the scale of its block of 64 weights.

A layer computes with its weights rounded to these levels in the dtype of its input, so its results equal the results of
an ordinary layer with such weights, forward and backward. bitsandbytes quantizes and restores the weights; its layers
are not used, because on CPUs with AVX512-BF16 they also round the scales, but only without gradients, so that scores
and gradients would disagree.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from whet.base.errors import WhetError
from whet.base.extras import extra
from whet.models.attention.forest import decoder_of
from whet.models.moe.experts import experts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64  # weights with one scale
_AT_ONCE = 2**16  # weights that are quantized together, so that they stay in the processor's cache


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weights are stored in 4 bits."""

    packed: Tensor  # uint8, two weights each: [outputs, inputs / 2] if rows have whole blocks, else [weights / 2]
    scales: Tensor  # float32, [outputs, inputs / BLOCK] or [blocks]

    def __init__(self, linear: nn.Linear, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """``linear`` gives the sizes and the bias, ``dtype`` the type of the restored weights."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        # PEFT reads its dtype and device. It is empty, so that any computation with it is an error.
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device=packed.device), persistent=False)

    def restored(self) -> Tensor:
        """Return the weights, [outputs, inputs]."""
        return restore(self.packed, self.scales, [self.out_features, self.in_features], self.weight.dtype)

    @property
    def W_q(self) -> Tensor:
        """Tell PEFT, as layers of HQQ do, that ``dequantize`` returns the weights; DoRA starts with their norms."""
        return self.packed

    def dequantize(self) -> Tensor:
        return self.restored()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        device = self.packed.device  # a change of the model's dtype must not round the scales
        self.scales = torch.empty_like(scales, device=device) if scales.is_meta else scales.to(device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.restored, self.bias)


def restore(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return weights of a ``shape`` from their packed form."""
    if packed.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    operation = torch.ops.bitsandbytes.dequantize_4bit
    weight: Tensor = operation(packed.reshape(-1), scales.reshape(-1), BLOCK, "nf4", shape, torch.float32)
    return weight.to(dtype)


def product(x: Tensor, restored: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
    """Return the product with frozen weights [outputs, inputs], plus a frozen bias, in autocast's dtype or that of the
    input. [..., inputs] -> [..., outputs]"""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = _Product.apply(x, restored, bias)
    return result


class _Product(torch.autograd.Function):
    """The product with weights that are computed again in the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, restored: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
        ctx.restored = restored
        return nn.functional.linear(x, restored().to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        restored: Callable[[], Tensor] = ctx.restored  # type: ignore[attr-defined]
        return gradient @ restored().to(gradient.dtype), None, None


def linears_to_quantize(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder, by name; its head and a vision tower are not among them. Raises
    ``WhetError`` for a mixture of experts."""
    if any(True for _ in experts_of(model)):
        raise WhetError(
            f"model.lora.quantize stores linear layers in 4 bits, but most weights of {type(model).__name__} are in "
            "experts, which are not linear layers; leave it out, or choose a dense model"
        )
    inside = set(decoder_of(model).modules())
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module in inside}


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def quantize(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Quantize the linear layers of a decoder in place, one after the other, so that memory shrinks on the way. All
    other weights get the ``dtype``. On ``meta`` only the sizes are made. Raises ``WhetError`` for a mixture of
    experts."""
    _import_operations()
    for name in list(linears_to_quantize(model)):
        linear = model.get_submodule(name)
        model.set_submodule(name, QuantizedLinear(linear, *_quantized(linear.weight.detach()), dtype))
    model.to(dtype)
    model.config.dtype = dtype


def _import_operations() -> None:
    with extra("qlora", "model.lora.quantize"):
        import bitsandbytes

        assert bitsandbytes.__version__, "the import registers torch.ops.bitsandbytes"


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's packed weights and scales."""
    if weight.device.type == "meta":
        packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8, device="meta")
        scales = torch.empty(-(-weight.numel() // BLOCK), dtype=torch.float32, device="meta")
        return _by_rows(packed, scales, weight)
    parts = [
        torch.ops.bitsandbytes.quantize_4bit(part.float(), BLOCK, "nf4", torch.uint8)
        for part in weight.reshape(-1).split(_AT_ONCE)
    ]
    packed, scales = torch.cat([packed.view(-1) for packed, _ in parts]), torch.cat([scales for _, scales in parts])
    return _by_rows(packed, scales, weight)


def _by_rows(packed: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed weights and the scales of each row, if no block is in two rows."""
    if weight.shape[1] % BLOCK:
        return packed, scales
    return packed.view(len(weight), -1), scales.view(len(weight), -1)


def dequantize(model: "PreTrainedModel") -> None:
    """Replace quantized layers by ordinary ones with the same values, in place, also under LoRA."""
    for name, module in quantized_layers(model).items():
        with torch.device("meta"):
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight = nn.Parameter(module.restored(), requires_grad=False)
        plain.bias = module.bias
        model.set_submodule(name, plain)
