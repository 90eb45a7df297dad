"""Digests of tensors, to check whether two sides have the same weights, bit for bit, in the same places.

The bytes of a tensor are split into 32-bit lanes and rows of 4096 lanes. A row's sum of lane times weight, modulo 2^64,
is computed on the tensor's device, so a GPU's tensors are not copied; then the sums, with dtype and shape, are hashed.

A weight is an odd 64-bit number, so that a change of a single lane never cancels; all weights differ in their low 33
bits, so that a swap of two lanes of a row never cancels. Any other difference is missed with a probability of about
2^-32. Plain addition of lanes, or 64-bit lanes, would miss swapped rows or swapped signs. It guards against mistakes,
not against an adversary.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

_LANES = 4096
_ROWS_CPU = 64  # 2 MiB of 64-bit lanes, which fit into the cores' caches
_ROWS_ACCELERATOR = 8192
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def digest(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return a 64-bit number for each tensor, equal on any device and in any process for equal dtype, shape and
    bits."""
    return {name: tensor_digest(tensor) for name, tensor in named}


def differing(first: Mapping[str, int], second: Mapping[str, int]) -> list[str]:
    """Return the names whose digests differ, or that only one side has; in order of ``first``, then of ``second``."""
    return [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits, as equal digests would show."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    bits = BITS.get(first.element_size(), first.dtype)
    return torch.equal(first.detach().view(bits), second.detach().to(first.device).view(bits))


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> int:
    """Return the digest of one tensor. Strided tensors are digested as if contiguous."""
    content = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}\n".encode(), digest_size=8)
    for lanes in _lanes(tensor.detach()):
        content.update(_row_sums(lanes).cpu().numpy().tobytes())
    return int.from_bytes(content.digest(), "little")


def _lanes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor's bytes as int32: whole rows [rows, 4096] without a copy, and the rest [0 or 1, 4096], padded
    with zeros, which the hashed shape accounts for."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 4:
        flat = flat.clone()
    row = 4 * _LANES
    whole = flat.numel() // row * row
    rest = torch.zeros(row if whole < flat.numel() else 0, dtype=torch.uint8, device=flat.device)
    rest[: flat.numel() - whole] = flat[whole:]
    return flat[:whole].view(torch.int32).view(-1, _LANES), rest.view(torch.int32).view(-1, _LANES)


def _row_sums(lanes: Tensor) -> Tensor:
    """Return the weighted sums of rows, modulo 2^64. [rows, 4096] int32 -> [rows] int64"""
    weights = _weights().to(lanes.device)
    at_once = _ROWS_CPU if lanes.device.type == "cpu" else _ROWS_ACCELERATOR
    products = torch.empty(min(at_once, len(lanes)), _LANES, dtype=torch.int64, device=lanes.device)
    blocks = [torch.mul(block, weights, out=products[: len(block)]).sum(1) for block in lanes.split(at_once)]
    return torch.cat(blocks) if blocks else lanes.new_empty(0, dtype=torch.int64)


@functools.cache
def _weights() -> Tensor:
    """Return the weights, [4096] int64, odd, pairwise different in their low 33 bits; the same in every process and
    version."""
    noise = hashlib.shake_256(b"whet weights digest").digest(8 * _LANES)
    return torch.from_numpy(np.frombuffer(noise, dtype="<i8") | 1)
