"""A lazy torch for modules that a recipe imports: importing torch takes seconds, and reading a recipe must not. And the
dtypes that settings and files can name.

    from whet.base.lazy import Tensor, torch

``torch`` is imported when an attribute of it is first used; ``Tensor`` is for annotations, which must not be evaluated
(``from __future__ import annotations``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import dtype as TorchDtype

__all__ = ["Tensor", "torch"]

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)  # later lookups bypass __getattr__
            return value

    torch, Tensor = _LazyTorch(), "Tensor"


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function as ``torch.no_grad()`` does, without importing torch."""

    @wraps(function)
    def computed(*args: P.args, **named: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **named)

    return computed


Dtype = Literal["float64", "float32", "bfloat16", "float16"]
FileDtype = Literal["float32", "bfloat16", "float16"]  # of the weights in model folders


def torch_dtype(name: str) -> TorchDtype:
    """Return the torch dtype of this name, such as ``torch.bfloat16``. Raises ``ValueError`` for another name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype such as float32 or bfloat16")
    return dtype
