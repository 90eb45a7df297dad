"""Activations whose result of a row doesn't depend, to the bit, on the other rows.

torch divides an operation on many elements among its threads and computes the last elements of a part, if they don't
fill a vector, by another formula. With one or two threads all vectors are full. Few elements are not divided.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

_UNDIVIDED = 16384  # elements
_MODULES = {"torch.nn.modules.activation", "transformers.activations"}


def fix_activations(model: nn.Module) -> None:
    """Let the activations of a model on a CPU compute few rows at a time."""
    for module in model.modules():
        if type(module).__module__ in _MODULES and not any(True for _ in module.parameters()):
            setattr(module, "forward", by_rows(module.forward))  # noqa: B010


def by_rows(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of rows, [..., A] -> [..., B], that computes few of them at a time."""
    return partial(_by_rows, function)


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if torch.get_num_threads() <= 2 or rows.numel() <= _UNDIVIDED or x.device.type != "cpu":
        return function(x)
    results = [function(part) for part in rows.split(max(1, _UNDIVIDED // x.shape[-1]))]
    return torch.cat(results).view(*x.shape[:-1], -1)
