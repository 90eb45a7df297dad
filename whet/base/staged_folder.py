"""A folder that one process at a time writes, under a temporary name. The process holds a kernel lock on it, which ends
with the process in any case: so the next one tells a folder that is being written from one that a kill left behind."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whet.base.errors import ConfigError
from whet.base.files import error_context, moving, remove


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder. On success it replaces ``path``; on failure it is removed. What a killed process left is
    removed before. Raises ``ConfigError`` if another process is writing ``path``, and ``WhetError`` naming ``path`` for
    an ``OSError``."""
    with error_context(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.staging")
        lock = _locked(staging, path)
        try:
            with moving(staging, path):
                for left in staging.iterdir():
                    remove(left)
                yield staging
        finally:
            os.close(lock)


def _locked(staging: Path, path: Path) -> int:
    """Create the folder if there is none, and return its lock. Another process may rename or remove the folder before
    it is locked; then try again."""
    while True:
        made = False
        with suppress(FileExistsError):
            staging.mkdir()
            made = True
        with suppress(FileNotFoundError):
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ConfigError(
                    f"{path} is being written by another process; wait until it has ended, or choose another folder"
                ) from None
            except OSError as error:  # a file system without locks
                if not made:
                    os.close(lock)
                    why = f"{staging} exists, left by a process that was killed or is still writing; remove it"
                    raise FileExistsError(errno.EEXIST, why) from error
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), staging.stat()):
                    return lock
            os.close(lock)
