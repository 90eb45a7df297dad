"""A Python child process behind a socket pair: one request and one reply at a time, both bytes.

    Child("module:make")                        the child
      exchange(request, seconds) ── request ──▶ answer = make(); answer(request)
                                 ◀── reply ────

Who waits for whom: ``exchange`` waits for the reply until its deadline. A child that is late is killed, because its
reply could be mistaken for the next one. The child waits for requests without a deadline: the kernel kills it when its
owner ends for any reason (Linux; elsewhere it ends after the request in progress). Independent of what the requests
mean; nothing that a child sends is executed here.
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
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

from whet.base.errors import DeadlineError, WorkerError

log = logging.getLogger(__name__)

KILL_S = 10.0  # seconds to wait for a killed process to end
_FILES = 8  # maximal number of files sent with a request
COPIED = 71  # exit status of a fork of a child that user code made with os.fork

# Linux treats the end of the thread that started a process as the end of its parent, so this thread never ends.
STARTER = ThreadPoolExecutor(1, thread_name_prefix="whet-starter")


Message = bytes | Sequence[memoryview]
"""A message in one piece or several."""

Sending = Callable[[], contextlib.AbstractContextManager[Message]]
"""Makes a message, which is kept only while it is sent."""

Answer = Callable[..., bytes]
"""The request handler of a child; its arguments are the request, a ``bytearray``, and file descriptors."""


def thread_settings(count: int) -> dict[str, str]:
    """Return the environment of a process that computes on ``count`` threads and does not spin while it waits."""
    kinds = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(kinds, str(count)) | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class ChildDied(WorkerError):
    """The process ended. The message says how: "was killed by SIGKILL", "exited with status 3"."""


class Child:
    """The owner's side. One thread at a time may exchange; any thread may ``kill``."""

    def __init__(
        self,
        make: str,
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
        quiet: bool = False,
        under: Sequence[str] = (),
        interpreter: str | None = None,
    ) -> None:
        """Start a process that calls ``make`` ("module:name") once, and calls its result for every request.
        ``environment``: variables added to this process's; ``cores``: CPU affinity; ``quiet``: discard its standard
        output; ``under``: prefix of the command, another program that starts the child; ``interpreter``: path of a
        Python interpreter of the same version, whose packages precede this process's packages."""
        ours, theirs = socket.socketpair()
        start = f"serve({theirs.fileno()}, {os.getpid()}, {make!r}, {cores and list(cores)})"
        paths = f"sys.path[:] = {sys.path!r}" if interpreter is None else _paths_under_another_interpreter()
        command = f"import sys; {paths}; from {__name__} import serve; {start}"
        with theirs:
            self.process = STARTER.submit(
                subprocess.Popen,
                [*under, interpreter or sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else None,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # the owner handles interrupts from the keyboard
            ).result()
        self._socket, self._exchanging = ours, threading.Lock()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def exchange(
        self, request: Message | Sending, seconds: float | None = None, files: Sequence[int] = ()
    ) -> bytearray:
        """Send one request, with open ``files``, and return its reply. Raises ``ChildDied``, or ``DeadlineError`` after
        ``seconds``."""
        with self._exchanging:
            try:
                end = None if seconds is None else time.monotonic() + seconds
                with request() if callable(request) else contextlib.nullcontext(request) as message:
                    _send(self._socket, message, end, files)
                    del message
                return _receive(self._socket, end)[0]
            except TimeoutError:
                pass
            except (EOFError, OSError):
                raise ChildDied(self.how_it_ended()) from None
        self.kill()
        raise DeadlineError(f"no reply within {seconds:g} s")

    def kill(self) -> None:
        """Kill the process and its forks. Returns when they have ended, or after ``KILL_S``: a process that hangs in
        the system (a GPU driver, a network disk) ends later."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it is the leader of its process group
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed but still exists after %g s", self.process.pid, KILL_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        with self._exchanging:
            self._socket.close()

    def how_it_ended(self) -> str:
        """Return how the process ended, as in "was killed by SIGKILL"."""
        try:
            status = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _paths_under_another_interpreter() -> str:
    """Return the statement that sets ``sys.path``: this process's folders that precede Python's modules, the
    interpreter's folders, and this process's packages."""
    python = sysconfig.get_path("stdlib")
    at = sys.path.index(python)
    first = [path for path in sys.path[:at] if os.path.exists(path or ".")]
    packages = [path for path in sys.path[at + 1 :] if path != os.path.join(python, "lib-dynload")]
    # addsitedir also reads the .pth files, by which editable packages are found.
    return f"import site; sys.path[:] = {first!r} + sys.path[1:]; [site.addsitedir(path) for path in {packages!r}]"


def serve(number: int, owner: int, make: str, cores: list[int] | None) -> None:
    """Run the child: answer requests from the socket with file descriptor ``number``."""
    kill_on_parent_exit(owner)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda *_: None)  # sent to all processes of a job: the owner ends its children
    if cores is not None:
        os.sched_setaffinity(0, cores)
    mark_as_server()
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
        del request, reply  # free the memory before waiting for the next request


_serving = [0]


def mark_as_server() -> None:
    """Make this process, which may be a fork of the child, the one that serves."""
    _serving[0] = os.getpid()


def kill_on_parent_exit(owner: int) -> None:
    """Have the kernel kill this process, even if it is frozen, when its parent ``owner`` ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() not in (owner, 0):  # 0: the parent is in another PID namespace
        os._exit(1)


def resolve(path: str) -> Any:
    """Import and return ``module:name``."""
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
    """Return a message and the files sent with it. Raises ``EOFError`` if the other end is closed, ``TimeoutError`` at
    ``end``."""

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
