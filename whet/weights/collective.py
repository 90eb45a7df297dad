"""Buckets of weights by a broadcast from the learner's first rank to every engine at once: gloo between CPUs, NCCL
between GPUs, the same code. The group is apart from all others of either process and is made at the first refit.

Who waits for whom: each side waits for the others when they meet, and a receiver for the sender or for the receiver
that passes a bucket on to it, up to the deadline. The sender goes on at once and waits only before it writes to a
buffer again.
"""

import socket
import time
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whet.cluster.rendezvous import own_address
from whet.errors import DeadlineError, RefitError
from whet.weights.parcel import Layout, bucket_size, views

_SLOTS = 2


class Broadcast:
    """One end of the wire. The sender has rank 0."""

    def __init__(self, store: dist.Store, host: str, rank: int, ranks: int, backend: str, deadline: float) -> None:
        """Returns when all have come to ``store``, which is at ``host``."""
        self._timeout = timedelta(seconds=deadline)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._group: Any
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        options = kind.Options() if backend == "nccl" else kind._Options()
        options._timeout = self._timeout
        if backend == "gloo":
            options._devices = [kind.create_device(hostname=own_address(host))]
        self._group = kind(store, rank, ranks, options)

    def start(self, tensor: Tensor) -> Any:
        """Send or receive a tensor; for ``finish``."""
        return self._group.broadcast(tensor, 0)

    def finish(self, work: Any) -> None:
        """Wait for it."""
        begun, seconds = time.monotonic(), self._timeout.total_seconds()
        try:
            work.wait(self._timeout)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            if time.monotonic() - begun < seconds:
                raise RefitError(
                    f"a broadcast of weights broke off, because the learner or one of the engines is gone: {error}"
                ) from error
            raise DeadlineError(
                f"a broadcast of weights did not end within weights.deadline = {seconds:g} s; is something hung?"
            ) from error

    def close(self) -> None:
        """Also in the midst of a broadcast."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def join(host: str, port: int, rank: int, ranks: int, backend: str, deadline: float) -> Broadcast:
    """The receivers' way in."""
    try:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=deadline))
        return Broadcast(store, host, rank, ranks, backend, deadline)
    except RuntimeError as error:  # torch's own errors are of this kind
        raise DeadlineError(
            f"the learner and the other engines were not met at {host}:{port} within {deadline:g} s "
            f"(weights.deadline): {error}"
        ) from error


def receive(wire: Broadcast, bucket: int, layout: Layout) -> list[tuple[str, Tensor]]:
    """One bucket. Raises ``RefitError`` where another one comes."""
    header = torch.empty(2, dtype=torch.int64, device=wire.device)
    wire.finish(wire.start(header))
    found, size = header.tolist()
    memory = torch.empty(size, dtype=torch.uint8, device=wire.device)
    wire.finish(wire.start(memory))
    if found != bucket:
        lost = ", ".join(name for name, *_ in layout[found][:5])
        raise RefitError(f"bucket {found} of the weights came where {bucket} was due, so nobody took {lost}")
    return views(memory, layout[bucket])


class Collective:
    """The sender's side. It listens at ``host``, nowhere else."""

    method = "take_broadcast"

    def __init__(self, host: str, takers: int, deadline: float) -> None:
        self._host, self._ranks, self._deadline = host, takers + 1, deadline
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._layout: Layout = []
        self._memory: list[Tensor] = []
        self._under_way: dict[int, list[Any]] = {}
        self._wire: Future[Broadcast] | None = None

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Make room for the largest bucket. Returns where to meet, the first time."""
        self._layout = layout
        size = max(map(bucket_size, layout), default=0)
        if not self._memory or size > self._memory[0].numel():
            device = "cuda" if self._backend == "nccl" else "cpu"
            self._memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        if self._wire is not None:
            return None
        listening = socket.create_server((self._host, 0))
        port = listening.getsockname()[1]
        timeout = timedelta(seconds=self._deadline)
        store = dist.TCPStore(
            self._host, port, self._ranks, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        wire: Future[Broadcast] = Future()
        self._wire = wire

        def meet() -> None:
            try:
                wire.set_result(Broadcast(store, self._host, 0, self._ranks, self._backend, self._deadline))
            except BaseException as error:
                wire.set_exception(error)

        Thread(target=meet, name="meet the engines", daemon=True).start()
        return "join", (self._host, port, self._ranks, self._backend, self._deadline)

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Copy the tensors and start to send them. Returns the arguments of ``Receiver.take_broadcast``."""
        wire = self._met()
        slot = bucket % _SLOTS
        self._wait(slot)
        described, memory = self._layout[bucket], self._memory[slot]
        for (_, target), (_, tensor) in zip(views(memory, described), named, strict=True):
            target.copy_(tensor)
        size = bucket_size(described)
        header = torch.tensor([bucket, size], device=wire.device)
        self._under_way[slot] = [wire.start(header), wire.start(memory[:size])]
        return (bucket,)

    def sent(self) -> None:
        for slot in range(_SLOTS):
            self._wait(slot)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        self._memory, self._under_way = [], {}
        if wire is not None and wire.done() and wire.exception() is None:
            wire.result().close()

    def _met(self) -> Broadcast:
        assert self._wire is not None
        try:
            return self._wire.result(self._deadline)
        except (TimeoutError, RuntimeError) as error:
            raise DeadlineError(
                f"the engines did not meet the learner at {self._host} within {self._deadline:g} s to take its "
                f"weights: {error}"
            ) from error

    def _wait(self, slot: int) -> None:
        for work in self._under_way.pop(slot, ()):
            self._met().finish(work)
