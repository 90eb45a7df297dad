"""The learner's end of the wire: makes the weights a bucket at a time, casts them, takes their digests and writes
them to a transport. Runs where the weights are, in the process of the learner's first rank; what is alive beyond the
model is one bucket and the transport's buffers, never the model. Knows no engine.

Of several ranks all go through it together, because gathering takes all of them; only the first one sends.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.errors import RefitError
from whet.weights.digest import Digests
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
    """``weights``: what there is to send; ``first``: whether this rank is the one that sends; ``leaves``: whether
    tensors that go to the caller leave this process; ``host``: where engines can reach it."""

    def __init__(
        self, weights: Callable[[Sending], Named], first: bool = True, leaves: bool = False, host: str = "127.0.0.1"
    ) -> None:
        self._weights, self._first, self._leaves, self._host = weights, first, leaves, host
        self._transport: Transport | None = None
        self._sending: Sending | None = None
        self._layout: Layout = []
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._bucket = 0

    def begin(self, sending: Sending) -> Opening:
        """Start anew, whatever became of the last time."""
        self._sending, self._bucket = sending, 0
        weights = self._weights(sending)
        self._layout = lay_out(weights.described(), sending.dtype, sending.bucket_bytes)
        if sending.known is None or sending.transport is None:
            self.close()
        self._tensors = iter(weights.tensors())
        setup = None
        if self._first and sending.transport is not None:
            self._transport = self._transport or _transport(sending, self._host)
            setup = self._transport.open(self._layout)
        known = hashlib.sha256(json.dumps([sending.transport, self._layout]).encode()).hexdigest()
        return Opening(None if known == sending.known else self._layout, known, setup, machine())

    @torch.no_grad()
    def next(self) -> Parcel | None:
        """The next bucket; None when all were sent. On the other ranks it has no content."""
        assert self._sending is not None
        if self._bucket == len(self._layout):
            return None
        method, arguments, tensors = "", (), []
        with Digests() as digests:
            named = self._cast(digests)
            if not self._first:
                for _ in named:
                    pass  # gathering takes all ranks
            elif self._transport is not None:
                method, arguments = self._transport.method, self._transport.write(self._bucket, named)
            else:
                tensors = [(name, tensor.cpu() if self._leaves else tensor) for name, tensor in named]
        size = payload(self._layout[self._bucket]) if self._first else 0
        self._bucket += 1
        return Parcel(method, arguments, digests.found, size, tensors)

    def _cast(self, digests: Digests) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors as they are to arrive, each made when it is asked for."""
        assert self._sending is not None
        for name, *_ in self._layout[self._bucket]:
            found, tensor = next(self._tensors)
            if found != name:
                raise RefitError(f"the learner's weights changed while they were sent: {found} came for {name}")
            if self._first:
                tensor = tensor.to(self._sending.dtype)
                if self._sending.digest:
                    digests.add(name, tensor)
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


def _transport(sending: Sending, host: str) -> Transport:
    from whet.weights.collective import Collective
    from whet.weights.disk import Disk
    from whet.weights.shared_memory import SharedMemory

    if sending.transport == "disk":
        return Disk(sending.folder)
    if sending.transport == "collective":
        return Collective(host, sending.takers, sending.deadline)
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
