"""The messages between a learner and the way of its weights to a generator. Plain data, so that a learner in
another process understands it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whet.weights.config import TransportName
from whet.weights.manifest import Manifest

Content = Literal["merged", "base", "adapter"]
"""Which weights: all of them with LoRA merged in, all without LoRA, or LoRA's tensors alone."""


@dataclass(slots=True, frozen=True)
class WeightRequest:
    """A request for weights: which, and how they come."""

    dtype: torch.dtype  # they are cast to it
    bucket_bytes: int | None  # they come so many at a time, counted before and after the cast; a larger tensor alone
    digest: bool = True
    content: Content = "merged"
    transport: TransportName | None = None  # None: as tensors, to the caller
    anew: bool = True  # the receivers know nothing of what was sent before
    receivers: int = 1  # processes that take each bucket
    folder: Path | None = None  # where files are written; None: the system's temporary folder
    deadline: float = 300.0  # seconds that a broadcast may take

    @property
    def every_rank(self) -> bool:
        """True where every rank of a learner writes, for whoever reads on its device, False for the first one alone."""
        return self.transport == "cuda_ipc"


@dataclass(slots=True, frozen=True)
class Handshake:
    """The answer to a request: what receivers have to know before the first bucket."""

    machine: str  # where the sender is
    manifest: Manifest | None  # None where it is as they know it
    connection: tuple[Any, ...] | None  # how to read what the transport carries; None where they know it


@dataclass(slots=True, frozen=True)
class Bucket:
    """Some of the weights. What is on the transport is read by the bucket's number."""

    number: int  # from 0
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)  # without a transport; they may be the model's own
    digests: dict[str, int] = field(default_factory=dict)  # of the tensors after the cast, where they leave a process
    bytes: int = 0


class WeightSource(Protocol):
    """A learner, or whoever holds a model. One refit at a time: begin, next until None, end."""

    async def begin_weights(self, request: WeightRequest) -> Handshake: ...
    async def next_weights(self) -> Bucket | None: ...
    async def end_weights(self) -> None: ...


class NamedTensors(Protocol):
    """Weights of a model, in the same order each time they are gone through."""

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return (Hugging Face name, of LoRA's tensors PEFT's; type; shape) of each, and make none."""
        ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...
