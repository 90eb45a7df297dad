"""The layout of a model's tensors in buckets, which is the same on both ends of a refit."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from whet.base.lazy import torch_dtype

ALIGNED = 64  # bytes; a tensor must lie on a multiple of its element's size
PLAIN = "plain"
"""The encoding of a tensor that is stored unchanged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket."""

    name: str  # Hugging Face's name; for LoRA's tensors PEFT's
    dtype: str  # torch's name of it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the bucket
    encoding: str = PLAIN

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        dtype = torch_dtype(self.dtype)
        return dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of the bucket's ``memory`` [bytes] (uint8)."""
        return memory[self.offset : self.offset + self.size].view(torch_dtype(self.dtype)).view(self.shape)


Manifest = tuple[tuple[Entry, ...], ...]
"""The tensors of each bucket, in order."""


def pack(described: Iterable[tuple[str, torch.dtype, torch.Size]], dtype: torch.dtype, max_bytes: int) -> Manifest:
    """Return the buckets of tensors (name, dtype, shape) that are cast to ``dtype``. Each has at most ``max_bytes``,
    before and after the cast; a larger tensor is alone."""
    buckets: list[list[Entry]] = []
    total = offset = 0
    for name, source, shape in described:
        size = shape.numel() * max(source.itemsize, dtype.itemsize)
        if not buckets or total + size > max_bytes:
            buckets.append([])
            total = offset = 0
        entry = Entry(name, str(dtype).removeprefix("torch."), tuple(shape), offset)
        buckets[-1].append(entry)
        total += size
        offset += -(-entry.size // ALIGNED) * ALIGNED
    return tuple(map(tuple, buckets))


def bucket_size(bucket: Sequence[Entry]) -> int:
    """Return the bytes of a bucket."""
    return max([ALIGNED, *(entry.offset + entry.size for entry in bucket)])


def itemsize(bucket: Sequence[Entry]) -> int:
    """Return the bytes of an element of a bucket, whose tensors have one dtype."""
    return torch_dtype(bucket[0].dtype).itemsize


def largest_bucket(manifest: Manifest) -> int:
    """Return the bytes of the largest bucket."""
    return max(map(bucket_size, manifest), default=0)


def views(memory: Tensor, bucket: Sequence[Entry]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of a bucket; the tensors are views of ``memory`` [bytes] (uint8)."""
    return [(entry.name, entry.view(memory)) for entry in bucket]


def fill(memory: Tensor, bucket: Sequence[Entry], named: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a bucket's tensors into ``memory`` [bytes] (uint8); each is computed when it is copied."""
    for entry, (_, tensor) in zip(bucket, named, strict=True):
        entry.view(memory).copy_(tensor)


def to_text(manifest: Manifest) -> str:
    """Return a manifest as plain text, which any engine's messages can carry."""
    return json.dumps([[astuple(entry) for entry in bucket] for bucket in manifest])


def from_text(text: str) -> Manifest:
    """Return the manifest of a text from ``to_text``."""
    return tuple(
        tuple(Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in bucket)
        for bucket in json.loads(text)
    )
