"""Buckets of weights by a broadcast from the learner's first rank to all engines: gloo between CPUs, NCCL between GPUs.
The process group is separate from all others and is created at the first refit.

Who waits for whom: all sides wait for each other when they connect, and a receiver waits for the sender, or for the
receiver that forwards a bucket to it, up to the deadline. The sender continues at once and waits only before it writes
to a buffer again.

With ``delta`` both ends keep a copy of all buckets, and only elements whose bits changed are sent. A new group, or a
new manifest, starts with whole buckets.
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
from whet.cluster.rendezvous import local_address
from whet.processes.machine import environment
from whet.weights.delta import apply, difference
from whet.weights.manifest import Manifest, bucket_size, fill, itemsize, largest_bucket, views
from whet.weights.shared_memory import settle

_BUFFERS = 2
# Otherwise a watchdog ends the process if a broadcast hangs, instead of an error in the waiting call.
_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


class Broadcast:
    """One end of a broadcast. The sender has rank 0."""

    def __init__(
        self,
        store: dist.Store,
        host: str,
        rank: int,
        ranks: int,
        backend: str,
        device: torch.device,
        deadline: float,
        delta: bool = False,
    ) -> None:
        """Return when all ranks have connected to ``store``, which is at ``host``. ``device``: the device of the
        weights, with NCCL. ``delta``: keep what is read, for the elements that change later."""
        self._kept: dict[int, Tensor] | None = {} if delta else None
        self._manifest: Manifest = ()  # of what is kept
        self._timeout = timedelta(seconds=deadline)
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._group: Any
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        if backend == "gloo":
            options = kind._Options()
            options._timeout = self._timeout
            options._devices = [kind.create_device(hostname=local_address(host))]
            self._group = kind(store, rank, ranks, options)
            return
        options = kind.Options()
        options._timeout = self._timeout
        with environment(_NCCL):
            self._group = kind(store, rank, ranks, options)
        # NCCL connects in its first collective, which blocks until all ranks are in it, without a deadline. So it is
        # done here, after all ranks have arrived, and not where one side waits for the other's answer.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(ranks)], self._timeout)
        self.finish(self.start(torch.zeros(1, device=self.device)))

    def start(self, tensor: Tensor) -> dist.Work:
        """Start to send or receive a tensor; ``finish`` waits for it."""
        return self._group.broadcast(tensor, 0)

    def finish(self, work: dist.Work) -> None:
        """Wait for a started broadcast. Raises ``RefitError`` if another end is gone, ``DeadlineError`` if it hangs."""
        begun, seconds = time.monotonic(), self._timeout.total_seconds()
        try:
            work.wait(self._timeout)
            settle(self.device)
        except RuntimeError as error:
            if time.monotonic() - begun < seconds:
                raise RefitError(
                    f"a broadcast of weights failed, because the learner or one of the engines is gone: {error}"
                ) from error
            raise DeadlineError(
                f"a broadcast of weights did not end within weights.deadline = {seconds:g} s; is something hung?"
            ) from error

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        """Receive one bucket. Raises ``RefitError`` if a different one arrives."""
        header = torch.empty(3, dtype=torch.int64, device=self.device)
        self.finish(self.start(header))
        number, size, whole = header.tolist()
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            self.finish(self.start(memory))
        if number != bucket:
            lost = ", ".join(entry.name for entry in manifest[number][:5])
            raise RefitError(f"bucket {number} of the weights arrived instead of {bucket}, so {lost} were not loaded")
        return views(self._completed(memory, manifest, bucket, bool(whole)), manifest[bucket])

    def _completed(self, memory: Tensor, manifest: Manifest, bucket: int, whole: bool) -> Tensor:
        """Return the memory of the whole bucket, of which ``memory`` may be the changed elements only."""
        if self._kept is None:
            return memory
        if manifest is not self._manifest:
            self._kept, self._manifest = {}, manifest
        if whole:
            self._kept[bucket] = memory
        elif bucket in self._kept:
            apply(memory, self._kept[bucket], itemsize(manifest[bucket]))
        else:
            raise RefitError(
                f"only changes of bucket {bucket} of the weights arrived, but the engine never had it whole"
            )
        return self._kept[bucket]

    def close(self) -> None:
        """Leave the group, even during a broadcast."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def join(
    device: torch.device,
    rank: int,
    host: str,
    port: int,
    ranks: int,
    backend: str,
    deadline: float,
    delta: bool = False,
) -> Broadcast:
    """Connect to the sender and the other receivers. Raises ``ConfigError`` if NCCL would bring weights to a CPU."""
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError(
            "weights.transport=collective sends from GPU to GPU if the learner has one, but the engine computes on a "
            "CPU; set weights.transport=shared_memory"
        )
    try:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=deadline))
        return Broadcast(store, host, rank, ranks, backend, device, deadline, delta)
    except RuntimeError as error:  # torch's errors
        raise DeadlineError(
            f"the learner and the other engines did not connect at {host}:{port} within {deadline:g} s "
            f"(weights.deadline): {error}"
        ) from error


class BroadcastWriter:
    """The learner's end, whose weights are on ``device``. It listens at ``host`` only. ``delta``: send only elements
    that changed since the bucket was sent before."""

    def __init__(self, host: str, receivers: int, device: torch.device, deadline: float, delta: bool = False) -> None:
        self._host, self._ranks, self._device, self._deadline = host, receivers + 1, device, deadline
        self._kept: dict[int, Tensor] | None = {} if delta else None
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._manifest: Manifest = ()
        self._memory: list[Tensor] = []
        self._in_flight: dict[int, list[Any]] = {}
        self._store: dist.TCPStore | None = None
        self._wire: Broadcast | None = None

    def open(self, manifest: Manifest) -> tuple[object, ...] | None:
        """Allocate memory for the largest bucket. Return the address of the group, the first time."""
        if self._kept and manifest != self._manifest:
            self._kept = {}
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
        return self._host, port, self._ranks, self._backend, self._deadline, self._kept is not None

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> int:
        """Copy the tensors and start to send them to all receivers, which must connect within the deadline."""
        wire, number = self._connected(), bucket % _BUFFERS
        self._wait(number)
        memory, entries = self._memory[number], self._manifest[bucket]
        fill(memory, entries, named)
        whole = memory[: bucket_size(entries)]
        changed = self._changed(bucket, whole)
        sent = whole if changed is None else changed
        header = torch.tensor([bucket, len(sent), changed is None], dtype=torch.int64, device=wire.device)
        self._in_flight[number] = [wire.start(part) for part in (header, sent) if len(part)]
        return len(sent)

    def _changed(self, bucket: int, whole: Tensor) -> Tensor | None:
        """Return the payload of the changed elements; None if the whole bucket must be sent."""
        if self._kept is None:
            return None
        before = self._kept.get(bucket)
        if before is None:
            self._kept[bucket] = whole.clone()
            return None
        changed = difference(whole, before, itemsize(self._manifest[bucket]))
        before.copy_(whole)
        return changed

    def taken(self) -> None:
        for number in range(_BUFFERS):
            self._wait(number)

    def close(self) -> None:
        wire, self._wire, self._store = self._wire, None, None
        self._memory, self._in_flight, self._kept = [], {}, None if self._kept is None else {}
        if wire is not None:
            wire.close()

    def _connected(self) -> Broadcast:
        assert self._store is not None
        try:
            if self._wire is None:
                self._wire = Broadcast(
                    self._store, self._host, 0, self._ranks, self._backend, self._device, self._deadline
                )
        except RuntimeError as error:
            raise DeadlineError(
                f"the engines did not connect to the learner at {self._host} within {self._deadline:g} s to load its "
                f"weights: {error}"
            ) from error
        return self._wire

    def _wait(self, number: int) -> None:
        for work in self._in_flight.pop(number, ()):
            self._connected().finish(work)
