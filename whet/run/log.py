"""The log of a run, and standard outputs that may lose their reader (a pipe to ``head``, a terminal that was closed)
without ending the run."""

import io
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.metadata import version
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from whet import __version__
from whet.base.escaping import escape_controls
from whet.base.files import error_context

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Screen(logging.Handler):
    """Prints to the stderr of that moment: a live display takes it over, so that lines don't tear it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"{record.levelname.lower()}: {escape_controls(record.getMessage())}", file=sys.stderr)
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the record is in the log file, and no other output is left."""


class _File(WatchedFileHandler):
    """Opens the file again if it was removed or replaced. Ignores failed writes: on a full disk, the next file that
    matters raises an error with its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._path, self._folder = path, path.parent.stat()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def reopenIfNeeded(self) -> None:
        """Stay with the file if its folder was moved, also if another one has the folder's name."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.parent.stat(), self._folder):
                super().reopenIfNeeded()

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Lossy(io.FileIO):
    """Drops output that can't be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        written = None  # also of a full pipe that does not wait
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Write the log records of ``whet`` to ``log.txt``, and warnings to the screen as well."""
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    with error_context(folder / "log.txt"):
        file = _File(folder / "log.txt")
    screen = _Screen(logging.WARNING)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    for handler in (file, screen):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, screen):
            logger.removeHandler(handler)
        file.close()


def versions() -> str:
    """Return the versions that a run may depend on."""
    packages = (f"{name} {version(name)}" for name in ("torch", "transformers"))
    return ", ".join([f"whet {__version__}", *packages, f"Python {platform.python_version()}"])


def seconds_by_phase(times: Mapping[str, float]) -> str:
    """Return the time of a step and of its phases, the longest first."""
    phases = sorted(((s, name.removeprefix("time/")) for name, s in times.items() if name != "time/step"), reverse=True)
    shown = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in phases if seconds >= 0.05)
    return f"{times['time/step']:.1f} s" + (f": {shown}" if shown else "")


@contextmanager
def readers_may_go() -> Iterator[None]:
    """Inside, output of any code that can't be written is dropped: hours of training are worth more than a line.
    Streams that replace the process's streams, as in a notebook, are not changed."""
    with ExitStack() as stack:
        for stream, original, redirect in (
            (sys.stdout, sys.__stdout__, redirect_stdout),
            (sys.stderr, sys.__stderr__, redirect_stderr),
        ):
            if original is not None and stream is original:
                lossy = _lossy(original)
                stack.callback(lossy.flush)
                stack.enter_context(redirect(lossy))
        yield


def _lossy(stream: TextIO) -> TextIO:
    """Return a stream that writes where this one does."""
    with suppress(OSError):
        stream.flush()
    file = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
