"""Mixtures of experts, through transformers' experts interface, without a fork of modelling code.

Inputs are the hidden states of one layer, [n, H], and the experts that its router chose, [n, k]. The products are
transformers' grouped products, computed in autocast's dtype (transformers excludes them from autocast). If a layer's
experts are distributed over ranks, an ``Exchange`` sends tokens to them and back.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "whet_experts"
ADAPTERS = "whet_adapters"
"""The name under which an experts module has its LoRA, by parameter. Not an attribute that torch would take for a
submodule."""
EXCHANGE = "whet_exchange"
"""The name under which an experts module has its ``Exchange``, if its experts are distributed over ranks."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states [n, H], experts [n, k] and their weights [n, k] -> [n, H]."""


class Exchange(Protocol):
    """Sends tokens to experts on other ranks, and the results back."""

    @property
    def first(self) -> int:
        """The index of the first expert on this rank."""
        ...

    def __call__(self, compute: Compute, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return ``compute`` for tokens whose experts, [n, k], are numbered over all ranks; ``compute`` itself numbers
        the experts of this rank from 0."""
        ...


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, by name, that have the fused parameters of a layer's routed experts, [experts, ...]."""
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):  # marks modules that use transformers' experts interface
            yield name, module


def use_grouped_experts(model: nn.Module) -> None:
    """Select ``NAME`` in a transformers model with experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if any(True for _ in experts_of(model)):
        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
        model.set_experts_implementation(NAME)  # type: ignore[operator]


def _forward(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    here: Any = _Here(module)
    products = batched_mm_experts_forward if here.dtype == torch.float64 else grouped_mm_experts_forward

    def compute(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = products(here, hidden, chosen, weights)
        return result

    exchange: Exchange | None = vars(module).get(EXCHANGE)
    if exchange is None:
        return compute(hidden.to(here.dtype), chosen, weights).to(hidden.dtype)
    return exchange(compute, hidden.to(here.dtype), chosen, weights).to(hidden.dtype)


class _Here:
    """An experts module as transformers' functions see it, with this rank's experts, in the dtype of products."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        exchange: Exchange | None = vars(module).get(EXCHANGE)
        adapters = vars(module).get(ADAPTERS, {})
        for name, parameter in module.named_parameters(recurse=False):
            weight: Any = parameter
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            if torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32:
                weight = weight.to(torch.get_autocast_dtype(weight.device.type))
            if name in adapters:
                weight = adapters[name].adapted(weight, 0 if exchange is None else exchange.first)
            setattr(self, name, weight)
            self.num_experts, self.dtype = weight.shape[0], weight.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
