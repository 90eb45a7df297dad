"""The types of numbers that settings and files name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from whet.base.lazy import torch

if TYPE_CHECKING:
    from torch import dtype as TorchDtype

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
FileDtype = Literal["float32", "bfloat16", "float16"]  # of the weights in model folders


def torch_dtype(name: str) -> TorchDtype:
    """Return torch's type of this name, for example ``torch.bfloat16``. Raises ``ValueError`` for another name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of torch, such as float32 or bfloat16")
    return found
