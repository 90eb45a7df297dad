"""LoRA for routed experts, whose matrices are fused in parameters [experts, ...]: A and B for each expert. PEFT
creates, saves and merges them. PEFT's forward pass swaps parameters, which sharded parameters don't allow; here the
experts add their LoRA when they are computed (``whet.models.moe.experts``)."""

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from whet.models.moe.experts import ADAPTERS, experts_of


class ExpertAdapter(ParamWrapper):
    """Wraps the experts of a layer, for one of their parameters."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        output: Tensor = self.base_layer(*args, **kwargs)
        return output

    def adapted(self, weight: Tensor, first: int) -> Tensor:
        """Return the matrices of some experts, from ``first`` on, with LoRA added."""
        here = slice(first, first + len(weight))
        for name in () if self.disable_adapters else self.active_adapters:
            left, right, scaling = self.get_delta_factors(name)
            left, right = (side[here].to(weight.dtype) for side in (left, right))
            weight = torch.baddbmm(weight, left, right, alpha=scaling)
        return weight

    def added(self, a: Tensor, b: Tensor) -> Tensor:
        """Return B A of all experts, in the layout of the parameter. a: [experts x rank, inputs], b: [outputs, rank x
        experts]."""
        a = a.reshape(self.num_experts, -1, a.shape[-1])
        b = b.reshape(len(b), -1, self.num_experts).permute(2, 0, 1)
        delta = b @ a
        return delta if self._did_swap_in_out_features else delta.transpose(1, 2)


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the matrices of all routed experts."""
    return [
        f"{name}.{kind}"
        for name, module in experts_of(model)
        for kind, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def take_over(model: nn.Module) -> None:
    """Replace PEFT's wrappers, so that the experts apply their LoRA themselves."""
    module: Any
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = ExpertAdapter
            vars(module.get_base_layer()).setdefault(ADAPTERS, {})[module.parameter_name] = module
