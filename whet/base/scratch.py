"""Temporary folders. The process that creates one holds a kernel lock on it, which ends with the process in any case.
So the folder of a process that was killed can be recognised, and the next process that creates one removes it."""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PREFIX = "whet-tmp-"


class Scratch:
    """A new temporary folder that only this user can enter. It is removed by ``remove``, at the end of a ``with``
    block, when this object is freed, or when the process exits.

    >>> with Scratch("prep") as folder:
    ...     (folder / "rows.jsonl").touch()
    """

    def __init__(self, purpose: str, within: Path | None = None) -> None:
        """``purpose`` is part of its name. ``within``: a folder other than the system's temporary one, perhaps shared
        by machines that don't see each other's locks: abandoned folders are removed there only if their purpose, which
        should name the machine, is the same."""
        parent, prefix = within or Path(tempfile.gettempdir()), f"{_PREFIX}{purpose}-"
        _remove_abandoned(parent, prefix if within else _PREFIX)
        self.path, lock = _create(prefix, parent)
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        _open.add(self)

    def keep(self) -> None:
        """Leave the folder behind, like a process that is killed."""
        self.remove.detach()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


_open = weakref.WeakSet[Scratch]()


def remove_scratch() -> None:
    """Remove all folders of this process, before an exit that skips Python's own cleaning."""
    for scratch in list(_open):
        scratch.remove()


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of this user whose processes have ended, and no others."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # its process lives, the file system has no locks, or it is another user's
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)


def _create(prefix: str, parent: Path) -> tuple[Path, int]:
    """Return a new folder and its lock. Another process may remove the folder before it is locked; then try again."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks, where nothing is removed later
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
