"""A lazy torch for modules that a recipe imports: importing torch takes seconds, and reading a recipe must not.

    from whet.base.lazy import Tensor, torch

``torch`` is imported when an attribute of it is first used; ``Tensor`` is for annotations, which must not be evaluated
(``from __future__ import annotations``).
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

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
