"""The remote side of calls: builds a worker in a separate process, runs its methods, and returns their results,
exceptions and logs as plain data. Independent of the cluster."""

import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from typing import Any

from whet.cluster.base import RankInfo
from whet.cluster.call import RemoteTraceback, call_method
from whet.cluster.message import unpacked
from whet.cluster.rendezvous import LOOPBACK, local_address
from whet.config import Config
from whet.processes.machine import keep_freed_memory


@dataclass(slots=True)
class Reply:
    """The outcome of a call."""

    log: list[logging.LogRecord]
    value: object = None
    error: bytes | None = None  # the pickled exception
    traceback: str = ""

    def result(self, rank: int) -> object:
        """Return the value or raise the exception, with its class if that can be imported here. First emits the
        worker's log records."""
        for record in self.log:
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                record.msg = f"rank {rank}: {record.msg}" if rank else record.msg
                logger.handle(record)
        if self.error is None:
            return self.value
        try:
            error = pickle.loads(self.error)
        except Exception:  # its class can't be imported here
            error = None
        if not isinstance(error, BaseException):
            error = _as_text(self.traceback)
        raise error from RemoteTraceback(self.traceback)


class Host:
    """One worker and its process. As the request handler of a ``Child`` it takes packed requests: the first one builds
    the worker, later ones call it."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._first = True  # of the ranks of its shard
        self._answer: Callable[..., Reply] = self.build

    def __call__(self, request: bytearray) -> bytes:
        answer, self._answer = self._answer, self.call
        try:
            reply = answer(*unpacked(request))
        except Exception as error:  # the request refers to classes that can't be imported here
            reply = failed(error, [])
        try:
            return pickle.dumps(reply)
        except Exception as error:
            return pickle.dumps(failed(error, reply.log))

    def build(self, worker: type, config: Config, info: RankInfo) -> Reply:
        """Build the worker."""
        self._first = info.rank % (info.ranks // info.shards) == 0
        keep_freed_memory()
        if name := interface_to(info.rendezvous.rpartition(":")[0]):  # gloo would resolve the machine's host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one

        def build() -> None:
            self._worker = worker(config, replace(info, remote=True))

        return _answer(build)

    def call(self, method: str, args: tuple[object, ...], of_shard: bool = False) -> Reply:
        """Run one method. ``of_shard``: the result is that of the whole shard, which its first rank sends."""
        reply = _answer(lambda: call_method(self._worker, method, args))
        if of_shard and not self._first:
            reply.value = None
        return reply


def _answer(run: Callable[[], object]) -> Reply:
    with _records() as log:
        try:
            return Reply(log, run())
        except BaseException as error:
            return failed(error, log)


def failed(error: BaseException, log: list[logging.LogRecord]) -> Reply:
    """Return a reply that raises. An exception that can't be pickled becomes a ``RuntimeError`` with its text."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = pickle.dumps(error)
        survives = type(pickle.loads(pickled)) is type(error)
    except Exception:
        survives = False
    return Reply(log, None, pickled if survives else pickle.dumps(_as_text(text)), text)


def _as_text(text: str) -> RuntimeError:
    return RuntimeError(text.rpartition("\n")[2])


@contextmanager
def _records() -> Iterator[list[logging.LogRecord]]:
    """Collect the log records of ``whet`` inside the block, as plain data."""
    records: list[logging.LogRecord] = []
    handler = collect(records)
    try:
        yield records
    finally:
        logging.getLogger("whet").removeHandler(handler)


def collect(records: list[logging.LogRecord]) -> logging.Handler:
    """Add a handler, which is returned, that appends the log records of ``whet`` to ``records``."""
    handler = _Collecting(records)  # type: ignore[arg-type]
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


class _Collecting(QueueHandler):
    """Makes records picklable; the queue is a list."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.append(record)  # type: ignore[attr-defined]


def interface_to(host: str) -> str | None:
    """Return the network interface by which this machine reaches ``host``, or None."""
    if not host or host == LOOPBACK:
        return ("lo0" if sys.platform == "darwin" else "lo") if host else None
    import psutil

    try:
        address = local_address(host)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if address in [entry.address for entry in entries]), None)
