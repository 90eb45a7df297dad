"""What a run says to people while it runs: its log, and outputs that may lose their reader (a pipe to ``head``, a
terminal that was closed) without ending the run."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from whet.base.escaping import escape_controls

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
        """Say nothing: the log file has it, and there is no other place to say it."""


class _File(logging.FileHandler):
    """Says nothing where it can't write: on a full disk the next file that matters is an error, with its name."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Lossy(io.FileIO):
    """Drops what can't be written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        written = None  # also of a full pipe that does not wait
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """What ``whet`` logs goes to ``log.txt``; warnings are for people to see at once."""
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    file, screen = _File(folder / "log.txt", encoding="utf-8"), _Screen(logging.WARNING)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    for handler in (file, screen):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, screen):
            logger.removeHandler(handler)
        file.close()


@contextmanager
def readers_may_go() -> Iterator[None]:
    """Inside, output that can't be written is lost, whoever prints it: hours of training are worth more than a line. A
    stream that is not the process's own, as in a notebook, stays as it is."""
    with ExitStack() as stack:
        for stream, own, redirect in (
            (sys.stdout, sys.__stdout__, redirect_stdout),
            (sys.stderr, sys.__stderr__, redirect_stderr),
        ):
            if own is not None and stream is own:
                lossy = _lossy(own)
                stack.callback(lossy.flush)
                stack.enter_context(redirect(lossy))
        yield


def _lossy(stream: TextIO) -> TextIO:
    """Return a stream that writes where this one does."""
    with suppress(OSError):
        stream.flush()
    file = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
