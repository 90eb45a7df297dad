"""The current weights of a model under the names that the plain Hugging Face model has. LoRA is merged on the way out,
one matrix at a time, left out, or all there is; the model itself is never changed. Knows no generator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import WhetError
from whet.weights.parcel import Content

_LORA = ("lora_A.", "lora_B.")


def named_weights(
    model: nn.Module,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    merged: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and persistent buffer, a tied head included, detached.

    With LoRA, W + scaling B A, or W alone if not ``merged``. ``whole`` makes all of a tensor out of the part that is
    here; it is called when its turn comes. What is wider than ``dtype`` and not merged is cast to it before, so that
    less is gathered; else types don't change. The tensors may be the model's own: copy what must outlive the next step.
    """

    def plain(tensor: Tensor) -> Tensor:
        return whole(tensor.to(dtype) if dtype is not None and dtype.itemsize < tensor.dtype.itemsize else tensor)

    if not hasattr(model, "peft_config"):
        for name, tensor in model.state_dict().items():
            yield name, plain(tensor)
        return
    from peft.tuners.lora import LoraLayer

    wrapped: Any = model
    base: nn.Module = wrapped.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in base.state_dict().items():
        owner, _, inside = name.partition(".base_layer.")
        if owner in layers and inside:
            adapted = merged and inside == "weight"
            yield f"{owner}.{inside}", _merged(layers[owner], tensor, whole) if adapted else plain(tensor)
        elif not any(f".{part}" in name for part in _LORA):
            if "lora_" in name or "modules_to_save" in name:
                raise WhetError(
                    f"{name}: this kind of adapter can't be sent to a generator; use plain LoRA on linear layers"
                )
            yield name, plain(tensor)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
    weight = whole(weight)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            a, b = whole(layer.lora_A[adapter].weight.detach()), whole(layer.lora_B[adapter].weight.detach())
            delta = (b @ a).T if layer.fan_in_fan_out else b @ a
            weight = weight + (delta * layer.scaling[adapter]).to(weight.dtype)
    return weight


def adapter_weights(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of LoRA's A [rank, inputs] and B [outputs, rank] of each layer, under the names of PEFT's files,
    detached and unchanged in type. ``whole`` as above."""
    from peft.tuners.lora import LoraLayer

    if not hasattr(model, "peft_config"):
        raise WhetError("weights.lora=adapter sends what LoRA trains, and this model has none; set model.lora")
    wrapped: Any = model
    for name, layer in wrapped.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.active_adapters:
                for kind, matrices in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                    if adapter in matrices:
                        yield f"base_model.model.{name}.{kind}.weight", whole(matrices[adapter].weight.detach())


@dataclass(slots=True, frozen=True)
class ModelWeights:
    """The weights of a model, to be gone through again and again, and what they are going to be."""

    model: nn.Module
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
    content: Content = "merged"
    dtype: torch.dtype | None = None  # what they are going to be cast to; see ``named_weights``

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """(name, type, shape) of each; nothing is gathered or merged."""
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self._named(_without_numbers)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each. The tensors may be the model's own: copy what must outlive the next step."""
        return self._named(self.whole)

    def _named(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self.content == "adapter":
            return adapter_weights(self.model, whole)
        return named_weights(self.model, whole, merged=self.content == "merged", dtype=self.dtype)


def _without_numbers(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
