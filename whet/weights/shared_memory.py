"""Buckets of weights through memory that this process and the engine's share. Two buffers take turns, so that one is
filled while the engine loads from the other. The buffers have no name in any file system: nothing can be left over."""

import os
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.weights.receiver import views

_ALIGNED = 64  # bytes; a tensor must lie on a multiple of its element's size
_SLOTS = 2


class SharedMemory:
    """The sender's side. What describes a bucket (names, types, shapes, offsets) is sent once, and again only when it
    has changed."""

    method = "take_memory"

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("weights.transport=shared_memory needs Linux; use weights.transport=disk")
        self._memory: dict[int, Tensor] = {}
        self._files: dict[int, int] = {}  # open until the engine has mapped them
        self._described: dict[int, list[Any]] = {}

    def write(self, bucket: int, named: list[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Copy the tensors. Returns the arguments of ``Receiver.take_memory``. A slot is written again only after the
        engine has taken the bucket before."""
        slot = bucket % _SLOTS
        described, size = _describe(named)
        memory = self._grow(slot, size) if slot not in self._memory or self._memory[slot].numel() < size else None
        for (_, target), (_, tensor) in zip(views(self._memory[slot], described), named, strict=True):
            target.copy_(tensor)
        known = self._described.get(bucket) == described
        self._described[bucket] = described
        return bucket, slot, memory, None if known else described

    def _grow(self, slot: int, size: int) -> list[Any]:
        self._close(slot)
        file = os.memfd_create(f"whet-weights-{slot}")
        os.ftruncate(file, size)
        self._files[slot] = file
        self._memory[slot] = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
        return [f"/proc/{os.getpid()}/fd/{file}", size]

    def sent(self) -> None:
        """The engine has taken everything: it holds the memory by itself now."""
        for slot in list(self._files):
            self._close(slot)

    def _close(self, slot: int) -> None:
        if slot in self._files:
            os.close(self._files.pop(slot))


def _describe(named: list[tuple[str, Tensor]]) -> tuple[list[Any], int]:
    """([name, dtype, shape, offset] of each tensor, bytes of all)."""
    described, offset = [], 0
    for name, tensor in named:
        described.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return described, max(offset, _ALIGNED)
