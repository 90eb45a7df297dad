"""A run folder belongs to one process at a time. The kernel holds the lock, so it ends with the process, however that
ends; a lock file alone never means anything."""

import fcntl
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from whet.errors import WhetError

FILE = ".lock"

_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


class RunLock:
    """``with RunLock(run): ...``, or ``acquire`` and ``release``. Raises ``WhetError`` naming who has it."""

    def __init__(self, run: Path) -> None:
        self.path = run / FILE
        self._handle: int | None = None

    def acquire(self) -> "RunLock":
        """Take the folder at once or not at all."""
        if self._handle is not None:
            raise RuntimeError(f"this lock on {self.path.parent} is already held")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
            os.close(handle)
            raise WhetError(
                f"run folder {self.path.parent} is in use by {holder}. Stop that process or wait for it, or choose "
                "another run folder"
            ) from None
        except OSError as error:
            os.close(handle)
            raise WhetError(
                f"run folder {self.path.parent} can't be locked ({error}). Put it on a file system that supports flock"
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._handle = handle
        _held.add(self)
        return self

    def release(self) -> None:
        """Give the folder back. Does nothing where it is not held. The file stays: removing it would let two in."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _held.discard(self)
            os.close(handle)

    def __enter__(self) -> "RunLock":
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _let_go_in_child() -> None:
    # A forked child shares the lock: without this, a worker that outlives a killed run would keep the folder locked.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
