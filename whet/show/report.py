"""``report.html``: a run on one self-contained page that needs no network or server.

It is generated from ``recipe.yaml``, ``metrics.jsonl`` and ``rollouts/`` of a run folder; only the metrics are
required. During a run a thread keeps it up to date, until the run's end, even after an error: it is rewritten when
there are new metrics, at most once a minute and for at most 1% of the time.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.base.errors import DataError, WhetError
from whet.base.files import write_atomically
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.jsonl import FILE
from whet.show.charts import charts
from whet.show.heartbeat import Heartbeat
from whet.show.history import History
from whet.show.overview import Overview
from whet.show.page import encode, page
from whet.show.rollouts import cards, sample_rollouts

log = logging.getLogger(__name__)

EVERY = 60.0  # seconds
REPORT = "report.html"
_SHARE = 0.01


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` to the run folder and return its path. Raises DataError without metrics."""
    run, path = run_data(run_folder), run_folder / REPORT
    write_atomically(path, page({"runs": [run]}, str(run["name"])).encode("utf-8", "replace"))
    return path


def run_data(run_folder: Path) -> JsonObject:
    """Return everything that a page shows of a run. Raises DataError without metrics."""
    history = History(run_folder)
    history.read()
    if not history.train.steps.size and not history.evaluations:
        raise DataError(f"no metrics in {history.path}: the run has completed no step, or has no jsonl sink")
    records = sample_rollouts(run_folder)
    return Overview.of(run_folder).as_json(history) | {
        "charts": charts(history),
        "rollouts": cards(records, lambda card: len(encode(card))),
    }


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
        try:
            write_report(self._folder)
            self._seen = size
        except WhetError as error:  # for example metrics that a user has edited, or a full disk
            log.warning("%s is not up to date: %s", self._folder / REPORT, error)
        except Exception:
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
