"""The full current weights of a model under the names that the plain Hugging Face model has. LoRA is merged on the way
out, one matrix at a time: the model itself is never changed. Knows no generator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import WhetError

_LORA = ("lora_A.", "lora_B.")


def named_weights(
    model: nn.Module, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and persistent buffer, a tied head included, detached and unchanged in type.

    With LoRA, W + scaling B A. ``whole`` makes all of a tensor out of the part that is here; it is called when its turn
    comes. The tensors may be the model's own: copy what must outlive the next step.
    """
    if not hasattr(model, "peft_config"):
        for name, tensor in model.state_dict().items():
            yield name, whole(tensor)
        return
    from peft.tuners.lora import LoraLayer

    wrapped: Any = model
    plain: nn.Module = wrapped.get_base_model()
    layers = {name: module for name, module in plain.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in plain.state_dict().items():
        owner, _, inside = name.partition(".base_layer.")
        if owner in layers and inside:
            yield f"{owner}.{inside}", _merged(layers[owner], tensor, whole) if inside == "weight" else whole(tensor)
        elif not any(f".{part}" in name for part in _LORA):
            if "lora_" in name or "modules_to_save" in name:
                raise WhetError(
                    f"{name}: this kind of adapter can't be merged on the fly; use plain LoRA on linear layers"
                )
            yield name, whole(tensor)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
    weight = whole(weight)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            a, b = whole(layer.lora_A[adapter].weight.detach()), whole(layer.lora_B[adapter].weight.detach())
            delta = (b @ a).T if layer.fan_in_fan_out else b @ a
            weight = weight + (delta * layer.scaling[adapter]).to(weight.dtype)
    return weight


@dataclass(slots=True, frozen=True)
class FullWeights:
    """``named_weights`` of a model, to be gone through again and again, and what they are going to be."""

    model: nn.Module
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """(name, type, shape) of each; nothing is gathered or merged."""
        return [(name, tensor.dtype, tensor.shape) for name, tensor in named_weights(self.model, _without_numbers)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each. The tensors may be the model's own: copy what must outlive the next step."""
        return named_weights(self.model, self.whole)


def _without_numbers(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
