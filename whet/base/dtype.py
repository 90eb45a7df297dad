"""The dtypes that settings and files can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from whet.base.lazy import torch

if TYPE_CHECKING:
    from torch import dtype as TorchDtype

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
FileDtype = Literal["float32", "bfloat16", "float16"]  # of the weights in model folders


def torch_dtype(name: str) -> TorchDtype:
    """Return the torch dtype of this name, such as ``torch.bfloat16``. Raises ``ValueError`` for another name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype such as float32 or bfloat16")
    return dtype
