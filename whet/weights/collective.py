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

from whet.base.errors import ConfigError, DeadlineError, RefitError
from whet.cluster.rendezvous import own_address
from whet.processes.machine import environment
from whet.weights.manifest import Manifest, bucket_size, fill, largest_bucket, views
from whet.weights.shared_memory import settle

_BUFFERS = 2
# Else a watchdog ends the process when a broadcast hangs, instead of an error in whoever waits for it.
_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


class Broadcast:
    """One end of a broadcast. The sender has rank 0."""

    def __init__(
        self, store: dist.Store, host: str, rank: int, ranks: int, backend: str, device: torch.device, deadline: float
    ) -> None:
        """Return when all have come to ``store``, which is at ``host``. ``device``: where weights are, with NCCL."""
        self._timeout = timedelta(seconds=deadline)
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._group: Any
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        if backend == "gloo":
            options = kind._Options()
            options._timeout = self._timeout
            options._devices = [kind.create_device(hostname=own_address(host))]
            self._group = kind(store, rank, ranks, options)
            return
        options = kind.Options()
        options._timeout = self._timeout
        with environment(_NCCL):
            self._group = kind(store, rank, ranks, options)
        # NCCL connects in its first collective and holds up whoever is in it until all are, without a deadline. So it
        # is here, where each side waits for the others, and not where one waits for the other's answer.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(ranks)], self._timeout)
        self.finish(self.start(torch.zeros(1, device=self.device)))

    def start(self, tensor: Tensor) -> Any:
        """Begin to send or receive a tensor; ``finish`` waits for it."""
        return self._group.broadcast(tensor, 0)

    def finish(self, work: Any) -> None:
        """Wait for what was begun. Raises ``RefitError`` when another end is gone, ``DeadlineError`` when it hangs."""
        begun, seconds = time.monotonic(), self._timeout.total_seconds()
        try:
            work.wait(self._timeout)
            settle(self.device)
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


def join(device: torch.device, rank: int, host: str, port: int, ranks: int, backend: str, deadline: float) -> Broadcast:
    """Meet the sender and the other receivers. Raises ``ConfigError`` where NCCL is to bring weights to a CPU."""
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError(
            "weights.transport=collective goes from GPU to GPU where the learner has one, and the engine computes on a "
            "CPU; set weights.transport=shared_memory"
        )
    try:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=deadline))
        return Broadcast(store, host, rank, ranks, backend, device, deadline)
    except RuntimeError as error:  # torch's own errors are of this kind
        raise DeadlineError(
            f"the learner and the other engines were not met at {host}:{port} within {deadline:g} s "
            f"(weights.deadline): {error}"
        ) from error


class BroadcastWriter:
    """The learner's end, whose weights are on ``device``. It listens at ``host``, nowhere else."""

    def __init__(self, host: str, receivers: int, device: torch.device, deadline: float) -> None:
        self._host, self._ranks, self._device, self._deadline = host, receivers + 1, device, deadline
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._manifest: Manifest = ()
        self._memory: list[Tensor] = []
        self._under_way: dict[int, list[Any]] = {}
        self._store: dist.TCPStore | None = None
        self._wire: Broadcast | None = None

    def open(self, manifest: Manifest) -> tuple[Any, ...] | None:
        """Make room for the largest bucket. Returns where to meet, the first time."""
        self._manifest, size = manifest, largest_bucket(manifest)
        if not self._memory or size > self._memory[0].numel():
            self._memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
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
            if self._wire is None:
                where = self._store, self._host, 0, self._ranks
                self._wire = Broadcast(*where, self._backend, self._device, self._deadline)
        except RuntimeError as error:
            raise DeadlineError(
                f"the engines did not meet the learner at {self._host} within {self._deadline:g} s to take its "
                f"weights: {error}"
            ) from error
        return self._wire

    def _wait(self, number: int) -> None:
        for work in self._under_way.pop(number, ()):
            self._met().finish(work)
