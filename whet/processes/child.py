"""A Python process of our own at the other end of a pair of sockets: one request, one reply at a time, both bytes.

    Child("module:make")                        the child
      exchange(request, seconds) ── request ──▶ answer = make(); answer(request)
                                 ◀── reply ────

Who waits for whom: ``exchange`` waits for the reply until its deadline. A child that is late is killed, for its reply
could be taken for that of the next request. The child waits for requests, without a deadline: the kernel kills it with
its owner, however that ends and whatever the child is doing (Linux; elsewhere it ends with the request under way).
Knows nothing of what is asked, and nothing that a child sends is ever run here.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

from whet.base.errors import DeadlineError, WorkerError

log = logging.getLogger(__name__)

KILL_S = 10.0  # a killed process is gone in less
_FILES = 8  # that may come with a request
COPIED = 71  # exit status of a copy of a child that user code made with os.fork

# Linux takes the end of the thread that started a process for the end of its parent, so this one never ends.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="whet-starter")


Message = bytes | Sequence[memoryview]
"""What is sent, in one piece or in several."""

Answer = Callable[..., bytes]
"""What a child does with a request, a ``bytearray``, and with the numbers of the files that came with it."""


def thread_settings(count: int) -> dict[str, str]:
    """The environment of a process that computes on so many threads, and leaves the cores to others while it waits."""
    kinds = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(kinds, str(count)) | {"OMP_WAIT_POLICY": "PASSIVE"}


class ChildDied(WorkerError):
    """The process is gone. The message says how: "was killed by SIGKILL", "exited with status 3"."""


class Child:
    """The owner's side. One thread exchanges at a time; ``kill`` may come from any."""

    def __init__(
        self,
        make: str,
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
        quiet: bool = False,
        under: Sequence[str] = (),
    ) -> None:
        """Start a process that calls what ``module:name`` names once, and what that returns for every request.
        ``environment`` is added to this process's own; ``cores``: those that it is bound to; ``quiet``: what it prints
        on its standard output is thrown away; ``under``: the command of another program that starts it."""
        ours, theirs = socket.socketpair()
        start = f"serve({theirs.fileno()}, {os.getpid()}, {make!r}, {cores and list(cores)})"
        command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; {start}"
        with theirs:
            self.process = _STARTER.submit(
                subprocess.Popen,
                [*under, sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else None,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # an interrupt from the keyboard is the owner's to handle
            ).result()
        self._socket, self._exchanging = ours, threading.Lock()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def exchange(self, request: Message, seconds: float | None = None, files: Sequence[int] = ()) -> bytearray:
        """Send one request, with open ``files``, return its reply. Raises ``ChildDied``, or ``DeadlineError`` after
        ``seconds``."""
        with self._exchanging:
            try:
                end = None if seconds is None else time.monotonic() + seconds
                _send(self._socket, request, end, files)
                return _receive(self._socket, end)[0]
            except TimeoutError:
                pass
            except (EOFError, OSError):
                raise ChildDied(self._how_it_ended()) from None
        self.kill()
        raise DeadlineError(f"no reply within {seconds:g} s")

    def kill(self) -> None:
        """Return once the process and the copies that it made of itself are gone, or after a while: one that hangs
        inside the system (a GPU's driver, a network disk) goes when that lets it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and is still there after %g s", self.process.pid, KILL_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for a reply is told at once
        with self._exchanging:
            self._socket.close()

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def serve(number: int, owner: int, make: str, cores: list[int] | None) -> None:
    """The child's life: answer the requests that come through the socket with that number."""
    die_with(owner)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, lambda *_: None)  # sent to all processes of a job: the owner decides when a child ends
    if cores is not None:
        os.sched_setaffinity(0, cores)
    carry_on()
    link = socket.socket(fileno=number)
    answer: Answer = resolve(make)()
    while True:
        try:
            request, files = _receive(link, None)
        except EOFError:
            return
        reply = answer(request, *files)
        if os.getpid() != _serving[0]:
            os._exit(COPIED)
        _send(link, reply, None)
        del request, reply  # what was sent must not be kept until the next request


_serving = [0]


def carry_on() -> None:
    """Have this process, which may be a copy of the child, be the one that serves."""
    _serving[0] = os.getpid()


def die_with(owner: int) -> None:
    """Have the kernel kill this process, even a frozen one, when ``owner``, its parent, ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() not in (owner, 0):  # 0: in another namespace of processes
        os._exit(1)


def resolve(path: str) -> Any:
    """What ``module:name`` names, in this process."""
    module, _, name = path.partition(":")
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _send(link: socket.socket, message: Message, end: float | None, files: Sequence[int] = ()) -> None:
    parts = [message] if isinstance(message, bytes) else message
    link.settimeout(_left(end))
    socket.send_fds(link, [sum(map(len, parts)).to_bytes(8, "big")], files)
    for part in parts:
        link.settimeout(_left(end))
        link.sendall(part)


def _receive(link: socket.socket, end: float | None) -> tuple[bytearray, list[int]]:
    """Return a message, and the files that came with it. Raises ``EOFError`` where nobody is at the other end any more,
    ``TimeoutError``."""

    def exactly(size: int) -> bytearray:
        received, at = bytearray(size), 0
        while at < size:
            link.settimeout(_left(end))
            count = link.recv_into(memoryview(received)[at:])
            if not count:
                raise EOFError
            at += count
        return received

    link.settimeout(_left(end))
    head, files, _, _ = socket.recv_fds(link, 8, _FILES)
    if not head:
        raise EOFError
    return exactly(int.from_bytes(head + exactly(8 - len(head)), "big")), files


def _left(end: float | None) -> float | None:
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
