"""A Python process of our own and the two pipes to it, with a deadline for every exchange. Requests are bytes, replies
are lines of JSON: a child that was taken over cannot send the parent anything that runs. The child exits when its
standard input closes. Knows nothing of what is asked.
"""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from whet.errors import DeadlineError

log = logging.getLogger(__name__)
KILL_S = 10.0  # a killed process is gone in less


class ChildProcess:
    """The parent's side."""

    def __init__(self, module: str, threads: int = 1):
        """Starts ``module.serve()`` in a new process, on so many threads."""
        kinds = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        # A thread that waits by spinning would take the core from the learner.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {name: str(threads) for name in kinds}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {module} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self.process.returncode

    def kill(self) -> None:
        """Return once the process is gone, or after a while: one that hangs inside the system (a GPU's driver, a
        network disk) goes when that lets it."""
        self.process.kill()
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and is still there after %g s", self.process.pid, KILL_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Send one request, return the reply. Raises ``EOFError`` when the process dies or was killed,
        ``DeadlineError`` when it takes too long."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            source, sink = self.process.stdout.fileno(), self.process.stdin.fileno()
        except ValueError:  # closed by ``kill``, perhaps by another thread
            raise EOFError from None
        deadline = time.monotonic() + seconds
        unsent = memoryview(len(request).to_bytes(8, "big") + request)
        received = bytearray()
        while not received.endswith(b"\n"):
            poll = select.poll()
            poll.register(source, select.POLLIN)
            if unsent:
                poll.register(sink, select.POLLOUT)
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise DeadlineError(f"no reply within {seconds:g} s")
            if sink in ready:
                try:
                    unsent = unsent[os.write(sink, unsent) :]
                except BrokenPipeError:
                    unsent = memoryview(b"")  # it died; the end of its output says so
            if source in ready:
                chunk = os.read(source, 1 << 16)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(1.0)  # the status says what it died of, if it is not killed too early
                    raise EOFError
                received += chunk
        reply = json.loads(received)
        assert isinstance(reply, dict)
        return reply


def to_parent() -> tuple[Callable[[], bytes | None], Callable[..., None]]:
    """The child's side: (receive, reply). ``receive()`` waits for a request, None at the end; ``reply(**values)``
    answers it. Whatever else the process reads or prints is cut off from the pipes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)

    def receive() -> bytes | None:
        size = int.from_bytes(requests.read(8), "big")
        return requests.read(size) if size else None

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    return receive, reply
