"""The learner's end of the wire: makes the weights a bucket at a time, casts them, takes their digests and writes
them to a transport. Runs where the weights are, in the process of the learner's first rank; what is alive beyond the
model is one bucket and the transport's buffers, never the model. Knows no engine.

Of several ranks all go through it together, because gathering takes all of them. The first one speaks to the engines;
whether the others write as well, ``Sending`` says.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.errors import RefitError
from whet.parallel.mesh import Ranks
from whet.weights.digest import tensor_digest
from whet.weights.parcel import Layout, Named, Opening, Parcel, Sending, lay_out, payload


class Transport(Protocol):
    """What carries buckets from here to there."""

    method: str  # of the receiver's, for each bucket

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Before the first bucket: what the receiver has to be told once (a method and its arguments), where there is
        something new."""
        ...

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Returns the method's arguments. Called for a bucket when the one before the last was taken. Each tensor is
        made when its turn comes."""
        ...

    def sent(self) -> None:
        """The receiver has taken everything."""
        ...

    def close(self) -> None:
        """Let go of everything, also in the midst of it."""
        ...


class Sender:
    """``weights``: what there is to send; ``ranks``: those that have it, with this one among them, None where it is
    alone; ``device``: where this one's tensors are; ``leaves``: whether tensors that go to the caller leave this
    process; ``host``: where engines can reach it."""

    def __init__(
        self,
        weights: Callable[[Sending], Named],
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        leaves: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self._weights, self._ranks, self._leaves, self._host = weights, ranks, leaves, host
        self._device = device or torch.device("cpu")
        self._first = ranks is None or ranks.seat.rank == 0
        self._transport: Transport | None = None  # where this rank writes to one
        self._sending: Sending | None = None
        self._layout: Layout = []
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._gathering = False
        self._bucket = 0

    def begin(self, sending: Sending) -> Opening:
        """Start anew, whatever became of the last time."""
        self._sending, self._bucket, self._gathering = sending, 0, False
        weights = self._weights(sending)
        self._layout = lay_out(weights.described(), sending.dtype, sending.bucket_bytes)
        if sending.known is None or sending.transport is None:
            self.close()
        self._tensors = iter(weights.tensors())
        setup = None
        if sending.transport is not None and (self._first or sending.every_rank):
            self._transport = self._transport or self._make_transport(sending)
            setup = self._transport.open(self._layout)
        known = hashlib.sha256(json.dumps([sending.transport, self._layout]).encode()).hexdigest()
        return Opening(None if known == sending.known else self._layout, known, setup, machine())

    @torch.no_grad()
    def next(self) -> Parcel | None:
        """The next bucket; None when all were sent. On the other ranks it has no content."""
        if self._bucket == len(self._layout):
            return None
        described, transport = self._layout[self._bucket], self._transport
        due, arguments, tensors, digests = iter(described), (), [], dict[str, int]()
        with self._in_step(due):
            named = self._cast(due, digests)
            if transport is not None:
                arguments = transport.write(self._bucket, named)
            elif self._first:
                tensors = [(name, tensor.cpu() if self._leaves else tensor) for name, tensor in named]
        self._bucket += 1
        if not self._first:
            return Parcel("", (), {}, 0, [])
        method = transport.method if transport is not None else ""
        return Parcel(method, arguments, digests, payload(described), tensors)

    @contextmanager
    def _in_step(self, due: Iterator[Any]) -> Iterator[None]:
        """Whatever becomes of what is done inside, this rank gathers all that is ``due`` with the others. Where all of
        them write, they fail together, and go on when all have written."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._gathering:  # nobody knows how far the others are
                raise
            failed = error
        for _ in due:
            next(self._tensors, None)
        if self._ranks is not None and self._sending is not None and self._sending.every_rank:
            with self._ranks.together("writing weights for the engines"):
                if failed is not None:
                    raise failed
        elif failed is not None:
            raise failed

    def _cast(self, due: Iterator[Any], digests: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors as they are to arrive, each made when it is asked for."""
        assert self._sending is not None
        for name, *_ in due:
            self._gathering = True
            found, tensor = next(self._tensors)
            self._gathering = False
            if found != name:
                raise RefitError(f"the learner's weights changed while they were sent: {found} came for {name}")
            tensor = tensor.to(self._sending.dtype)
            if self._first and self._sending.digest:
                digests[name] = tensor_digest(tensor)
            yield name, tensor

    def end(self) -> None:
        """The receivers have taken everything."""
        self._tensors = iter(())
        if self._transport is not None:
            self._transport.sent()

    def close(self) -> None:
        self._tensors = iter(())
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _make_transport(self, sending: Sending) -> Transport:
        from whet.weights.collective import Collective
        from whet.weights.cuda_ipc import CudaIpc
        from whet.weights.disk import Disk
        from whet.weights.shared_memory import SharedMemory

        if sending.transport == "disk":
            return Disk(sending.folder)
        if sending.transport == "collective":
            return Collective(self._host, sending.takers, sending.deadline)
        if sending.transport == "cuda_ipc":
            return CudaIpc(self._device, self._ranks)
        return SharedMemory()


@dataclass(slots=True, frozen=True)
class Listed:
    """Weights that are there already, by their Hugging Face names."""

    named: list[tuple[str, Tensor]]

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self.named]

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.named


@cache
def machine() -> str:
    """Equal where memory can be shared: one system that has not been started anew, and one view of its processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()
