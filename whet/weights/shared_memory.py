"""Buckets of weights through memory that this process and the engine's share. Two buffers take turns, so that one is
filled while the engine loads from the other. The buffers have no name in any file system: nothing can be left over."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.weights.parcel import Layout, bucket_size, views

SLOTS = 2


class SharedMemory:
    """The sender's side."""

    method = "take_memory"

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("weights.transport=shared_memory needs Linux; use weights.transport=disk")
        self._layout: Layout = []
        self._size = 0
        self._memory: list[Tensor] = []
        self._files: list[int] = []  # open until the engines have mapped them

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Make room for the largest bucket. Returns the paths and the size of the buffers where they are new."""
        self._layout = layout
        size = max(map(bucket_size, layout), default=0)
        if size <= self._size:
            return None
        self.close()
        self._size = size
        for slot in range(SLOTS):
            file = os.memfd_create(f"whet-weights-{slot}")
            os.ftruncate(file, size)
            self._files.append(file)
            path = f"/proc/self/fd/{file}"
            self._memory.append(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
        return "map_memory", ([f"/proc/{os.getpid()}/fd/{file}" for file in self._files], size)

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Copy the tensors. Returns the arguments of ``Receiver.take_memory``. A slot is written again only after the
        engines have taken the bucket before."""
        slot = bucket % len(self._memory)
        for (_, target), (_, tensor) in zip(views(self._memory[slot], self._layout[bucket]), named, strict=True):
            target.copy_(tensor)
        return bucket, slot

    def sent(self) -> None:
        """The engines hold the memory by themselves now."""
        for file in self._files:
            os.close(file)
        self._files = []

    def close(self) -> None:
        self.sent()
        self._memory, self._size = [], 0
