"""NCCL's connection, tested with a fake that runs on CPUs: it connects in the first collective, which blocks until all
ranks are in it."""

import os
import threading
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from whet.base.errors import ConfigError, DeadlineError
from whet.weights import transport
from whet.weights.collective import Broadcast, BroadcastWriter
from whet.weights.manifest import pack
from whet.weights.source import WeightRequest

RANKS, DEADLINE = 2, 60.0
CPU = torch.device("cpu")


class Lazy:
    """A fake of ``ProcessGroupNCCL`` between threads. Its first broadcast returns when all ranks are in theirs."""

    together = threading.Barrier(RANKS)
    sent: Any = None
    settings: Any = ()

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, ranks: int, options: Any) -> None:
        self.rank, self.connected = rank, False
        type(self).settings = (*self.settings, os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        if not self.connected:
            self.together.wait(DEADLINE)
            self.connected = True
        if self.rank == root:
            self.sent.put(tensor.clone())
            return SimpleNamespace(wait=lambda timeout: None)
        return SimpleNamespace(wait=lambda timeout: self._take(tensor))

    def _take(self, tensor: Tensor) -> None:
        tensor.copy_(self.sent.get(timeout=DEADLINE))

    def abort(self) -> None:
        pass


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Lazy]:
    fake = type("Fake", (Lazy,), {"together": threading.Barrier(RANKS), "sent": Queue(), "settings": ()})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # what decides, decides for NCCL
    return fake


def _writer(deadline: float = DEADLINE) -> BroadcastWriter:
    writer = BroadcastWriter("127.0.0.1", RANKS - 1, CPU, deadline)
    writer._backend = "nccl"
    return writer


def test_nccl_connects_before_the_first_bucket_is_written(nccl: type[Lazy]) -> None:
    """A refit writes a bucket and only then tells the engines to take it: if NCCL connected only then, both would
    deadlock."""
    weights = [("w", torch.arange(6.0))]
    manifest = pack([("w", torch.float32, torch.Size([6]))], torch.float32, 64)
    writer = _writer()
    connection = writer.open(manifest)
    reader: list[Broadcast] = []

    def meet(host: str, port: int, ranks: int, backend: str, deadline: float, delta: bool) -> None:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=deadline))
        reader.append(Broadcast(store, host, 1, ranks, backend, CPU, deadline))

    meeting = threading.Thread(target=meet, args=connection, daemon=True)
    meeting.start()
    writer.write(0, weights)  # no rank reads yet
    meeting.join(DEADLINE)
    assert nccl.sent.qsize() == 2, "header and bucket wait to be taken"
    ((name, tensor),) = reader[0].read(manifest, 0)
    assert name == "w"
    assert torch.equal(tensor, weights[0][1])
    assert nccl.settings == ("1", "1"), "a hung broadcast raises in who waits, and no watchdog ends the process"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    writer.close()


def test_who_never_comes_is_an_error_before_nccl_waits_without_a_deadline(nccl: type[Lazy]) -> None:
    writer = _writer(deadline=2.0)
    manifest = pack([("w", torch.float32, torch.Size([6]))], torch.float32, 64)
    writer.open(manifest)
    with pytest.raises(DeadlineError, match="did not connect to the learner"):
        writer.write(0, [("w", torch.zeros(6))])


def test_both_ends_use_the_device_that_their_weights_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own current device is number 0, whichever the worker computes on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    request = WeightRequest(torch.float32, 64, transport="collective")
    writer: Any = transport.open_writer(request, torch.device("cuda", 3), None, "127.0.0.1")
    assert (writer._backend, writer._device) == ("nccl", torch.device("cuda", 3))
    writer = transport.open_writer(request, CPU, None, "127.0.0.1")
    assert writer._backend == "gloo", "a learner on the CPU of a machine with GPUs"
    with pytest.raises(ConfigError, match="the engine computes on a CPU"):
        transport.connect("collective", ("127.0.0.1", 1, 2, "nccl", 1.0, False), CPU, 1)
