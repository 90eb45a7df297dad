"""Signs of life of a command: a first line, then a line whenever nothing was printed for a while; in a terminal one
changing line, until a live display replaces it."""

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from whet import __version__
from whet.base.escaping import escape_controls
from whet.base.progress import PROGRESS, Progress

if TYPE_CHECKING:
    from rich.status import Status

EVERY = 20.0  # seconds: the documentation promises a line every 30, and a busy machine may be late
_LOOK = 0.5


class Heartbeat:
    """Prints the progress of this process while it is open. ``stream`` is standard output unless given.

    >>> with Heartbeat("quickstart, 20 steps"):
    ...     train()
    """

    def __init__(
        self, title: str = "", stream: TextIO | None = None, progress: Progress = PROGRESS, every: float | None = None
    ) -> None:
        self._title, self._progress, self._every = title, progress, EVERY if every is None else every
        self._stream = stream or sys.stdout  # resolved now, because sys.stdout may be redirected later
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whet-heartbeat", daemon=True)
        self._lock = threading.Lock()  # guards the line that changes
        self._status: Status | None = None

    def __enter__(self) -> Self:
        self._progress.begin("loading")
        self._progress.where = ""
        self._progress.mark_printed()
        if self._title:
            self.say(f"whet {__version__}: {self._title}: loading")
        if _is_terminal(self._stream):
            self._draw()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._progress.on_take_over(None)
        self._clear()
        self._thread.join(timeout=5)

    def say(self, text: str) -> None:
        """Print a line. A closed pipe is ignored here; the next regular output reports it."""
        with suppress(OSError, ValueError):
            print(escape_controls(text), file=self._stream, flush=True)
        self._progress.mark_printed()

    def line(self, now: float) -> str | None:
        """Return the line that is due at time ``now`` of the progress's clock, or None."""
        if self._progress.drawn or self._status is not None or now - self._progress.printed_at < self._every:
            return None
        words = time.strftime("%H:%M:%S"), self._progress.where, self._progress.text()
        return " ".join(filter(None, words))

    def _run(self) -> None:
        from rich.text import Text

        while not self._stop.wait(_LOOK):
            with self._lock:
                if self._status is not None:
                    self._status.update(Text(escape_controls(self._progress.text())))
            if line := self.line(self._progress.now()):
                self.say(line)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.text import Text

        console = Console(file=self._stream)
        if console.is_terminal and not console.is_dumb_terminal:
            self._status = console.status(Text("loading"))
            self._status.start()
            self._progress.on_take_over(self._clear)

    def _clear(self) -> None:
        with self._lock:
            if self._status is not None:
                self._status.stop()
                self._status = None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
