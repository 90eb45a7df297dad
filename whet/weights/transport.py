"""Transports of buckets of weights from a learner to engines: a writer at the learner's end, a reader in each process
of the engines."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from whet.parallel.mesh import Ranks
from whet.weights.config import TransportName
from whet.weights.manifest import Manifest

if TYPE_CHECKING:
    from whet.weights.source import WeightRequest


class Writer(Protocol):
    """The learner's end."""

    def open(self, manifest: Manifest) -> tuple[object, ...] | None:
        """Prepare for these buckets. Return the data that readers need to connect (plain data), if it is new."""
        ...

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> int:
        """Write a bucket, after the bucket before the last was taken, and return its bytes as they travel. Each tensor
        is computed when it is written."""
        ...

    def taken(self) -> None:
        """Release the written data, because all readers have taken it."""
        ...

    def close(self) -> None:
        """Release everything, even during a transfer."""
        ...


class Reader(Protocol):
    """The end of one process of an engine."""

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        """Return a bucket's tensors, which may be overwritten when the next but one is read."""
        ...

    def close(self) -> None: ...


def open_writer(request: "WeightRequest", device: torch.device, ranks: Ranks | None, host: str) -> Writer:
    """Return the writer of a rank whose tensors are on ``device``. ``ranks`` are the learner's, None for a single one;
    ``host``: the address at which engines can reach it."""
    from whet.weights import buffers, collective, disk

    match request.transport:
        case "disk":
            return disk.DiskWriter(request.folder)
        case "collective":
            return collective.BroadcastWriter(host, request.receivers, device, request.deadline, request.delta)
        case "cuda_ipc":
            return buffers.BufferWriter(device, ranks)
        case _:
            return buffers.BufferWriter(torch.device("cpu"))


def connect(transport: TransportName, connection: tuple[Any, ...], device: torch.device, rank: int) -> Reader:
    """Return the reader of a process that computes on ``device``, the ``rank``-th of all readers, from 1.
    ``connection`` is the result of the writer's ``open``."""
    from whet.weights import buffers, collective, disk

    match transport:
        case "disk":
            return disk.DiskReader(*connection)
        case "collective":
            return collective.join(device, rank, *connection)
        case "cuda_ipc":
            return buffers.BufferReader(device, *connection)
        case _:
            return buffers.BufferReader(torch.device("cpu"), *connection)
