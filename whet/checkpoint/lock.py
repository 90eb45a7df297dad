"""The lock of a run folder: one process at a time may use it. It is a kernel lock, so it ends with the process in any
case, and forked children do not keep it. The existence of the lock file has no meaning."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from whet.base.errors import WhetError
from whet.base.files import check_writable, error_context, room_in

FILE = ".lock"
_PATIENCE = 0.2  # seconds: a process that looks whether the lock is free holds it for a moment


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the lock of the run folder. Raises ``WhetError`` if another process holds it, with its id."""
    path = run / FILE
    check_writable(run)
    with error_context(run):
        run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=_PATIENCE, poll_interval=0.01, on_acquired=_sign, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text("utf-8", "replace").strip() or "an unknown process"
        raise WhetError(
            f"run folder {run} is in use by {holder}. Stop that process or wait for it, or choose another run folder"
        ) from None
    except OSError as error:
        need = "It must be on a writable file system with locks"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f"Free some space: {room_in(run)}"
        raise WhetError(f"run folder {run} can't be locked: {error}. {need}") from error
    try:
        yield
    finally:
        lock.release()


def is_locked(run: Path) -> bool:
    """Return whether a process uses the run folder now. Changes nothing in it."""
    path = run / FILE
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # on NFS, an exclusive one needs a file that is written
        except OSError:
            return True
    return False


def _sign(handle: int) -> None:
    """Write the holder's process id to the lock file."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
