"""Keeps ``report.html`` up to date during a run and at its end, even after an error. A thread rewrites it when there
are new metrics, at most once a minute and for at most 1% of the time."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.base.progress import PROGRESS
from whet.metrics.sinks.jsonl import FILE
from whet.show.heartbeat import Heartbeat

log = logging.getLogger(__name__)

EVERY = 60.0  # seconds
REPORT = "report.html"
_SHARE = 0.01


class LiveReport:
    """Keeps the report of ``folder`` up to date while it is open. Errors of writing it are only logged."""

    def __init__(self, folder: Path, every: float | None = None) -> None:
        self._folder, self._every = folder.absolute(), EVERY if every is None else every
        self._seen = self._size() if (self._folder / REPORT).exists() else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whet-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        PROGRESS.begin("writing the report")
        self._thread.join(timeout=60)
        self.refresh()

    def refresh(self) -> None:
        """Write the report if there are new metrics."""
        size = self._size()
        if size == self._seen:
            return
        from whet.show.report import write_report

        try:
            write_report(self._folder)
            self._seen = size
        except Exception:  # for example metrics or rollouts that a user has edited, or a full disk
            log.warning("%s can't be written", self._folder / REPORT, exc_info=True)

    def _run(self) -> None:
        wait = self._every
        while not self._stop.wait(wait):
            began = time.monotonic()
            self.refresh()
            wait = max(self._every, (time.monotonic() - began) / _SHARE)

    def _size(self) -> int:
        try:
            return (self._folder / FILE).stat().st_size
        except OSError:
            return 0


@contextmanager
def shown(title: str, folder: Path) -> Iterator[None]:
    """Print signs of life and keep the report up to date while a run is inside the block."""
    with Heartbeat(title), LiveReport(folder):
        yield
