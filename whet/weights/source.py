"""The messages between a learner and a weight sync. Plain data, so that they can be sent to a learner in another
process."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from whet.weights.config import TransportName
from whet.weights.manifest import Manifest

Content = Literal["merged", "base", "adapter"]
"""The kind of weights: all with LoRA merged, all without LoRA, or LoRA's tensors alone."""


@dataclass(slots=True, frozen=True)
class WeightRequest:
    """A request for weights: which ones, and how they are sent."""

    dtype: torch.dtype  # dtype to which they are cast
    bucket_bytes: int | None  # size of a bucket, before and after the cast; a larger tensor is alone
    digest: bool = True
    content: Content = "merged"
    transport: TransportName | None = None  # None: as tensors, to the caller
    connected: int = 0  # number of the receivers' connection (``Handshake.number``); 0: they have none
    receivers: int = 1  # number of processes that read each bucket
    folder: Path | None = None  # folder of files; None: the system's temporary folder
    deadline: float = 300.0  # seconds that a broadcast may take
    delta: bool = False  # a broadcast sends only elements that changed since the one before

    @property
    def every_rank(self) -> bool:
        """True if every rank of a learner writes, for the readers on its device; False for the first rank alone."""
        return self.transport == "cuda_ipc"


@dataclass(slots=True, frozen=True)
class Handshake:
    """The answer to a request: the information that receivers need before the first bucket."""

    machine: str  # the sender's machine
    manifest: Manifest | None  # None if it is unchanged
    connection: tuple[object, ...] | None  # how to connect to the transport; None if it is unchanged
    number: int = 0  # of the sender's connections so far, this one included


@dataclass(slots=True, frozen=True)
class Bucket:
    """Some of the weights. The data on the transport is read by the bucket's number."""

    number: int  # from 0
    # without a transport; may be the model's tensors
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)  # of the tensors after the cast, if they leave a process
    bytes: int = 0  # as they travel


class WeightSource(Protocol):
    """A learner, or another owner of a model. One refit at a time: begin, next until None, end; after an error,
    abandon."""

    async def begin_weights(self, request: WeightRequest) -> Handshake: ...
    async def next_weights(self) -> Bucket | None: ...
    async def end_weights(self) -> None: ...
    def abandon_weights(self) -> None:
        """Give an incomplete transfer up, without waiting for what is in progress. A learner can do nothing else before
        its transfer is ended or abandoned."""
        ...


class NamedTensors(Protocol):
    """Weights of a model, iterated in the same order each time."""

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return (name, dtype, shape) of each tensor without computing it; names are Hugging Face's, for LoRA's tensors
        PEFT's."""
        ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...
