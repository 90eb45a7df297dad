"""Experts and routers whose products of a row don't depend, to the bit, on the other rows; see
``whet.models.row_sizes``. Grouped products have as many rows for an expert as tokens chose it, so that a token's result
depends on the tokens next to it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.models.moe.experts import experts_of
from whet.models.row_activations import by_rows
from whet.models.row_sizes import fix_rows, sizes_for

NAME = "whet_fixed_experts"
_LAYERS = "whet_fixed_layers"
"""The name under which an experts module has its products as linear layers. Not an attribute that torch would take for
a submodule."""


def use_fixed_experts(model: nn.Module) -> None:
    """Select products of fixed numbers of rows for the experts of a model that samples on a CPU, and for their routers.
    The layers share the memory of the experts' weights, so new weights must be copied in place."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts: list[Any] = [module for _, module in experts_of(model)]
    if not experts or any(module.down_proj.device.type != "cpu" for module in experts):
        return
    for module in experts:
        first = "gate_up_proj" if module.has_gate else "up_proj"
        vars(module)[_LAYERS] = (_layers(module, first), _layers(module, "down_proj"))
    for router in filter(_multiplies, model.modules()):
        setattr(router, "forward", partial(_route, router.forward, _sizes(router)))  # noqa: B010
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    model.set_experts_implementation(NAME)  # type: ignore[operator]


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module is a router with a matrix; others have a linear layer, whose rows are fixed anyway."""
    return type(module).__name__.lower().endswith("router") and isinstance(getattr(module, "weight", None), Tensor)


def _layers(module: Any, name: str) -> list[nn.Linear]:
    """Return a linear layer for each expert, with the parameters of this name."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    layers = []
    for weight, bias in zip(weights.mT if module.is_transposed else weights, biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        layers.append(layer)
    fix_rows(nn.ModuleList(layers))
    return layers


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Hidden states [n, H], experts [n, k] and their weights [n, k] -> [n, H]."""
    first, second = vars(module)[_LAYERS]
    activate = by_rows(module._apply_gate if module.has_gate else module.act_fn)
    expert = chosen.flatten()
    results = hidden.new_empty(len(expert), hidden.shape[1])
    for index in expert.unique().tolist():
        rows = (expert == index).nonzero().squeeze(1)
        results[rows] = second[index](activate(first[index](hidden[rows // chosen.shape[1]])))
    weighted = results * weights.reshape(-1, 1)
    return weighted.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def _sizes(router: Any) -> Sequence[int]:
    """Return the numbers of rows for which a router's products agree, in its type and in float32, which some use."""
    outputs, inputs = router.weight.shape
    bias = isinstance(getattr(router, "bias", None), Tensor)
    types = dict.fromkeys([router.weight.dtype, torch.float32])
    return sizes_for(*(nn.Linear(inputs, outputs, bias, device="meta", dtype=dtype) for dtype in types))


def _route(forward: Any, sizes: Sequence[int], hidden: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    """Return a router's outputs, [n, ...] each, for hidden states [..., H]; some take a bias of the experts, too."""
    outputs = []
    for part in hidden.reshape(-1, hidden.shape[-1]).split(sizes[-1]):
        size = next(size for size in sizes if size >= len(part))
        filled = nn.functional.pad(part, (0, 0, 0, size - len(part)))
        outputs.append([output[: len(part)] for output in forward(filled, *biases)])
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
