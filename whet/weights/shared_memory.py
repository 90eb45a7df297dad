"""Buckets of weights through memory that this process and the engine's share. Two buffers take turns, so that one is
filled while the engine loads from the other. The buffers have no name in any file system: nothing can be left over."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.weights.memory import Handle, settle, share
from whet.weights.parcel import Layout, bucket_size, views

SLOTS = 2


class Slots:
    """Two buffers on a device, to which buckets are written in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layout: Layout = []
        self._memory: list[Tensor] = []
        self._before: list[Tensor] = []  # which the engines hold until they have opened the newer ones

    def make_room(self, layout: Layout) -> tuple[list[Handle], int] | None:
        """For the largest bucket. Returns the handles and the size of the buffers where they are new."""
        self._layout = layout
        size = max(map(bucket_size, layout), default=0)
        if self._memory and size <= self._memory[0].numel():
            return None
        self._before, self._memory = self._memory, []
        made = [share(size, self.device) for _ in range(SLOTS)]
        self._memory = [memory for memory, _ in made]
        return [handle for _, handle in made], size

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Copy the tensors. Returns the arguments of ``Receiver.take_memory``. A slot is written again only after the
        engines have taken the bucket before."""
        slot = bucket % len(self._memory)
        for (_, target), (_, tensor) in zip(views(self._memory[slot], self._layout[bucket]), named, strict=True):
            target.copy_(tensor)
        settle(self.device)
        return bucket, slot

    def sent(self) -> None:
        self._before = []

    def close(self) -> None:
        self._memory, self._before = [], []


class SharedMemory(Slots):
    """The sender's side, from the first rank's memory."""

    method = "take_memory"

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("weights.transport=shared_memory needs Linux; use weights.transport=disk")
        super().__init__(torch.device("cpu"))

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Make room for the largest bucket."""
        new = self.make_room(layout)
        return None if new is None else ("map_memory", new)
