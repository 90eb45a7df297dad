"""Buckets of weights by a broadcast from the learner's first rank to every engine at once: gloo between CPUs, NCCL
between GPUs, the same code. The group is apart from all others of either process and is made at the first refit.

Who waits for whom: each side waits for the others when they meet, and a receiver for the sender or for the receiver
that passes a bucket on to it, up to the deadline. The sender goes on at once and waits only before it writes to a
buffer again.
"""

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whet.cluster.rendezvous import own_address
from whet.errors import DeadlineError, RefitError
from whet.weights.manifest import Manifest, bucket_size, fill, largest_bucket, views

_BUFFERS = 2


class Broadcast:
    """One end of a broadcast. The sender has rank 0."""

    def __init__(self, store: dist.Store, host: str, rank: int, ranks: int, backend: str, deadline: float) -> None:
        """Return when all have come to ``store``, which is at ``host``."""
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
        """Begin to send or receive a tensor; ``finish`` waits for it."""
        return self._group.broadcast(tensor, 0)

    def finish(self, work: Any) -> None:
        """Wait for what was begun. Raises ``RefitError`` when another end is gone, ``DeadlineError`` when it hangs."""
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

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        """Receive one bucket. Raises ``RefitError`` where another one comes."""
        header = torch.empty(2, dtype=torch.int64, device=self.device)
        self.finish(self.start(header))
        found, size = header.tolist()
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.finish(self.start(memory))
        if found != bucket:
            lost = ", ".join(entry.name for entry in manifest[found][:5])
            raise RefitError(f"bucket {found} of the weights came where {bucket} was due, so nobody took {lost}")
        return views(memory, manifest[bucket])

    def close(self) -> None:
        """Leave the group, also in the midst of a broadcast."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def join(rank: int, host: str, port: int, ranks: int, backend: str, deadline: float) -> Broadcast:
    """Meet the sender and the other receivers."""
    try:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=deadline))
        return Broadcast(store, host, rank, ranks, backend, deadline)
    except RuntimeError as error:  # torch's own errors are of this kind
        raise DeadlineError(
            f"the learner and the other engines were not met at {host}:{port} within {deadline:g} s "
            f"(weights.deadline): {error}"
        ) from error


class BroadcastWriter:
    """The learner's end. It listens at ``host``, nowhere else."""

    def __init__(self, host: str, receivers: int, deadline: float) -> None:
        self._host, self._ranks, self._deadline = host, receivers + 1, deadline
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._manifest: Manifest = ()
        self._memory: list[Tensor] = []
        self._under_way: dict[int, list[Any]] = {}
        self._store: dist.TCPStore | None = None
        self._wire: Broadcast | None = None

    def open(self, manifest: Manifest) -> tuple[Any, ...] | None:
        """Make room for the largest bucket. Returns where to meet, the first time."""
        self._manifest, size = manifest, largest_bucket(manifest)
        if not self._memory or size > self._memory[0].numel():
            device = "cuda" if self._backend == "nccl" else "cpu"
            self._memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        if self._store is not None:
            return None
        timeout, listening = timedelta(seconds=self._deadline), socket.create_server((self._host, 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            self._host, port, self._ranks, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return self._host, port, self._ranks, self._backend, self._deadline

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors and start to send them, to those who have come or come within the deadline."""
        wire, number = self._met(), bucket % _BUFFERS
        self._wait(number)
        memory, entries = self._memory[number], self._manifest[bucket]
        fill(memory, entries, named)
        size = bucket_size(entries)
        header = torch.tensor([bucket, size], device=wire.device)
        self._under_way[number] = [wire.start(header), wire.start(memory[:size])]

    def taken(self) -> None:
        for number in range(_BUFFERS):
            self._wait(number)

    def close(self) -> None:
        wire, self._wire, self._store = self._wire, None, None
        self._memory, self._under_way = [], {}
        if wire is not None:
            wire.close()

    def _met(self) -> Broadcast:
        assert self._store is not None
        try:
            self._wire = self._wire or Broadcast(self._store, self._host, 0, self._ranks, self._backend, self._deadline)
        except RuntimeError as error:
            raise DeadlineError(
                f"the engines did not meet the learner at {self._host} within {self._deadline:g} s to take its "
                f"weights: {error}"
            ) from error
        return self._wire

    def _wait(self, number: int) -> None:
        for work in self._under_way.pop(number, ()):
            self._met().finish(work)
