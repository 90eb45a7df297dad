"""What the two ends of a refit tell each other: how weights are to be sent, how they are packed, what each bucket is.
Plain data, so that a learner in another process understands it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whet.weights.config import TransportName

Content = Literal["merged", "base", "adapter"]
"""Which weights: all of them with LoRA merged in, all without LoRA, or LoRA's tensors alone."""
ALIGNED = 64  # bytes; a tensor must lie on a multiple of its element's size

Layout = list[list[list[Any]]]
"""Of each bucket its tensors: [name, dtype, shape, offset in bytes]."""


@dataclass(slots=True, frozen=True)
class Sending:
    """Which weights are to be sent, and how."""

    dtype: torch.dtype  # they are cast to it
    bucket_bytes: int  # they travel so many at a time, counted before and after the cast; a larger tensor comes alone
    digest: bool = True
    transport: TransportName | None = None  # None: as tensors, to the caller
    known: str | None = None  # ``Opening.known`` of the last time; None: to somebody who knows nothing
    takers: int = 1  # processes that take each bucket
    folder: Path | None = None  # where files are written; None: the system's temporary folder
    deadline: float = 300.0  # seconds that a collective may take
    content: Content = "merged"

    @property
    def every_rank(self) -> bool:
        """Whether every rank of a learner writes, for whoever reads on its device, or the first one alone."""
        return self.transport == "cuda_ipc"


@dataclass(slots=True, frozen=True)
class Opening:
    """What is said before the first bucket."""

    layout: Layout | None  # of all buckets; None where the receiver knows it
    known: str  # names the layout and the transport
    setup: tuple[str, tuple[Any, ...]] | None  # a method of the receiver's to be called first, and its arguments
    machine: str  # where the sender is


@dataclass(slots=True, frozen=True)
class Parcel:
    """One bucket."""

    method: str  # of the receiver's
    arguments: tuple[Any, ...]
    digests: dict[str, int]  # of the tensors after the cast, by name; of the tensors, not of what was written
    bytes: int
    tensors: list[tuple[str, Tensor]]  # where there is no transport; they may be the model's own


class WeightSource(Protocol):
    """Who has the weights: a learner, or whoever holds a model. One at a time: begin, next until None, end."""

    async def begin_weights(self, sending: Sending) -> Opening: ...
    async def next_weights(self) -> Parcel | None: ...
    async def end_weights(self) -> None: ...


class Named(Protocol):
    """Weights of a model, in the same order each time they are gone through."""

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """What is going to come, without making it: (Hugging Face name, of LoRA's tensors PEFT's; type, shape)."""
        ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...


def lay_out(described: Iterable[tuple[str, torch.dtype, torch.Size]], dtype: torch.dtype, max_bytes: int) -> Layout:
    """The same tensors in the same order, cast to ``dtype`` and packed into buckets of at most ``max_bytes``."""
    layout: Layout = []
    held = offset = 0
    for name, kind, shape in described:
        count = shape.numel()
        size = count * max(kind.itemsize, dtype.itemsize)
        if not layout or held + size > max_bytes:
            layout.append([])
            held = offset = 0
        layout[-1].append([name, str(dtype).removeprefix("torch."), list(shape), offset])
        held += size
        offset += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
    return layout


def bucket_size(described: Iterable[Any]) -> int:
    """The bytes of one bucket of a layout."""
    ends = [offset + getattr(torch, kind).itemsize * torch.Size(shape).numel() for _, kind, shape, offset in described]
    return max([ALIGNED, *ends])


def payload(described: Iterable[Any]) -> int:
    """The bytes of its tensors alone."""
    return sum(getattr(torch, kind).itemsize * torch.Size(shape).numel() for _, kind, shape, _ in described)


def views(memory: Tensor, described: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """(name, tensor) of a bucket; the tensors are views of ``memory`` [bytes] (uint8)."""
    found = []
    for name, kind, shape, offset in described:
        dtype: torch.dtype = getattr(torch, kind)
        count = dtype.itemsize * torch.Size(shape).numel()
        found.append((name, memory[offset : offset + count].view(dtype).view(shape)))
    return found
