"""The cluster of one machine without Ray: each worker is a process of its own, at the other end of a socket pair.

Who waits for whom: a rank's thread waits for its process's reply. In the process, the main thread waits for requests
and a second one reads them, so that the end of the socket (the parent is gone) ends the process in the midst of a call.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from whet.cluster.base import Placement, Seat, WorkerGroup
from whet.cluster.group import Call, LinkedGroup
from whet.cluster.host import Host, Reply, die_with_parent, failed
from whet.cluster.rendezvous import LOOPBACK, Reservation, seats
from whet.config import Config
from whet.errors import WhetError, WorkerError
from whet.processes.cores import bind, divided_cores, part


class ProcessCluster:
    """Launches each worker in a process of this machine. ``cores``: those that the workers of a group divide."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self.cores = cores

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        if worker.__module__ == "__main__" or "<" in worker.__qualname__:
            raise WhetError(
                f"another process can't import {worker.__qualname__}: it must be a top-level class of a module, not "
                "one of a function or of the script that was started"
            )
        meeting = Reservation(LOOPBACK)
        links = []
        for seat in seats(placement, meeting.address):
            own = None if self.cores is None else part(self.cores, seat.rank, placement.ranks)
            threads = str(len(own)) if own else str(divided_cores(placement.ranks)) if placement.ranks > 1 else None
            links.append(_Process(worker, config, seat, threads, own, meeting))
        return LinkedGroup(worker, placement, links)

    async def close(self) -> None:
        """There is nothing to close: groups end their processes."""


class _Process:
    """The link to a worker in a process."""

    thread = None

    def __init__(
        self,
        worker: type,
        config: Config,
        seat: Seat,
        threads: str | None,
        cores: list[int] | None,
        meeting: Reservation,
    ) -> None:
        self._seat, self._meeting = seat, meeting
        self._start = pickle.dumps((worker, config, seat))
        ours, theirs = socket.socketpair()
        start = f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()}, {cores})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(threads, bound=cores is not None),
            start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self.where = f"pid {self._process.pid} on this machine"

    def build(self) -> None:
        self._exchange(self._start)

    def call(self, call: Call) -> Any:
        return self._exchange(call.packed(lambda *request: pickle.dumps(request)))

    def end(self) -> None:
        self._process.kill()  # what it wanted to do at the end, it has done in its close
        self._process.wait()

    def _exchange(self, request: bytes) -> Any:
        try:
            self._pipe.send_bytes(request)
            reply: Reply = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise WorkerError(f"its process {self._ended()}") from None
        return reply.result(self._seat.rank)

    def _ended(self) -> str:
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _environment(threads: str | None, bound: bool) -> dict[str, str]:
    """Of a worker. What the user has set goes before, but for a worker that is bound to some cores: more threads than
    cores would wait for each other."""
    own = {"OMP_NUM_THREADS": threads} if threads else {}
    return dict(os.environ) | own if bound else own | dict(os.environ)


def serve(socket_number: int, parent: int, cores: list[int] | None) -> None:
    """The process's life: build the worker, then answer requests until the parent is gone or kills it."""
    die_with_parent(parent)
    if cores is not None:
        bind(cores)
    pipe, requests, host = Connection(socket_number), SimpleQueue[bytes](), Host()

    def read() -> None:
        while True:
            try:
                requests.put(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    answer: Any = host.build
    while True:
        try:
            reply = answer(*pickle.loads(requests.get()))
        except Exception as error:  # the request holds what can't be imported here
            reply = failed(error, [])
        try:
            message = pickle.dumps(reply)
        except Exception as error:
            message = pickle.dumps(failed(error, reply.log))
        pipe.send_bytes(message)
        answer = host.call
        del reply, message  # what was sent must not be kept until the next call
