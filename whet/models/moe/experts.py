"""Mixtures of experts, through transformers' own experts interface: no fork of a modelling file.

What flows through: the hidden states of one layer, [n, H], and the experts that its router chose, [n, k]. The products
are transformers' grouped ones, computed in autocast's type (transformers leaves them out of autocast). Where a layer's
experts are spread over ranks, an ``Exchange`` takes tokens to them and back. Knows no device mesh.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "whet_experts"
ADAPTERS = "whet_adapters"
"""Where an experts module has its LoRA, by parameter. Not an attribute that torch would take for a child."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states [n, H], experts [n, k] and their weights [n, k] -> [n, H]."""


class Exchange(Protocol):
    """The way of tokens to experts that other ranks have, and back."""

    @property
    def first(self) -> int:
        """The number of the first expert that is here."""
        ...

    def __call__(self, compute: Compute, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``compute`` for tokens whose experts, [n, k], are counted over all ranks; ``compute`` itself counts those
        that are here from 0."""
        ...


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, by name, that hold the fused parameters of a layer's routed experts, [experts, ...]."""
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):  # transformers' mark of what goes through its interface
            yield name, module


def use_grouped_experts(model: nn.Module) -> None:
    """Select ``NAME`` in a transformers model that has experts."""
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

    exchange: Exchange | None = getattr(module, "whet_exchange", None)
    if exchange is None:
        return compute(hidden.to(here.dtype), chosen, weights).to(hidden.dtype)
    return exchange(compute, hidden.to(here.dtype), chosen, weights).to(hidden.dtype)


class _Here:
    """An experts module as transformers' functions see it, with the experts that are on this rank, in the type that
    products are computed in."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        exchange: Exchange | None = getattr(module, "whet_exchange", None)
        adapters = vars(module).get(ADAPTERS, {})
        for name, parameter in module.named_parameters(recurse=False):
            own: Any = parameter
            own = own.to_local() if hasattr(own, "to_local") else own
            if torch.is_autocast_enabled(own.device.type) and own.dtype == torch.float32:
                own = own.to(torch.get_autocast_dtype(own.device.type))
            if name in adapters:
                own = adapters[name].adapted(own, 0 if exchange is None else exchange.first)
            setattr(self, name, own)
            self.num_experts, self.dtype = own.shape[0], own.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
