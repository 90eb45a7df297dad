"""Importing torch takes seconds; reading a recipe must not. Configs that compute with tensors import it thus:

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")
"""

import importlib
from typing import Any


def lazy_import(name: str) -> Any:
    """A stand-in for the module, which is imported when an attribute is first used."""
    return _LazyModule(name)


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # next time without this detour
        return value
