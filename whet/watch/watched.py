"""A run that is watched: its metrics in memory, its rollouts on disk. Its methods block and are called in threads."""

import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.show.charts import Range, charts
from whet.show.history import History
from whet.show.overview import Overview
from whet.show.page import encode
from whet.watch.search import Place, Query, search, whole_episode

_THREADS = 4
_KEPT = 8  # encoded charts, one for each range
_READING = 0.5  # seconds between two looks at a run whose metrics are still being read
_OFTEN = 5.0  # seconds between two looks at the state, and at the folder of rollouts
_SHARE = 20  # looks at the rollouts take at most a twentieth of the time


class WatchedRun:
    """One run folder. ``refresh`` follows it; the other methods answer clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = History(folder)
        self.threads = ThreadPoolExecutor(_THREADS, "whet-watch")  # so that a folder that hangs delays no other
        self.version = 0  # grows with the metrics
        self._overview = Overview.of(folder)
        self._lock = threading.Lock()  # guards the history and the charts
        self._charts: OrderedDict[Range, bytes] = OrderedDict()
        self._steps: list[int] = []
        self._looked = self._listed = float("-inf")
        self.summary = b""  # JSON for the page
        self._look()

    def refresh(self) -> bool:
        """Read what is new. Return whether there is more to read at once."""
        with self._lock:
            try:
                changed = self.history.refresh()
            except OSError:  # of a vanished or unreadable folder: the state says so
                changed = False
            if changed:
                self.version += 1
                self._charts.clear()
            now = time.monotonic()
            wait = _OFTEN if not changed else 0.0 if self.history.share == 1 else _READING
            if now - self._looked >= wait:
                self._looked = now
                self._list_rollouts()
                self._look()
        return changed

    def _look(self) -> None:
        if not self._overview.settings:  # a run that had not written its recipe yet
            self._overview = Overview.of(self.folder)
        try:
            state = self._overview.state(self.history)
        except OSError:
            state = "gone"
        run = self._overview.as_json(self.history, state, time.time())
        run |= {"version": self.version, "recorded": len(self._steps), "read": int(100 * self.history.share) / 100}
        self.summary = encode(run).encode("utf-8", "replace")

    def _list_rollouts(self) -> None:
        """List the recorded steps again. A folder of 100,000 files takes a moment, so it is not done at each step."""
        began = time.monotonic()
        if began < self._listed:
            return
        try:
            with os.scandir(self.folder / "rollouts") as entries:
                names = [entry.name[5:-6] for entry in entries if entry.name.startswith("step-")]
            self._steps = sorted(int(name) for name in names if name.isdecimal())
        except OSError:
            self._steps = []
        now = time.monotonic()
        self._listed = now + _SHARE * (now - began)

    def charts(self, within: Range) -> bytes:
        """Return the charts of a range of steps as JSON."""
        with self._lock:
            if within not in self._charts:
                self._charts[within] = encode(charts(self.history, within)).encode()
                if len(self._charts) > _KEPT:
                    self._charts.popitem(last=False)
            return self._charts[within]

    def rollouts(self, query: Query, start: Place | None) -> bytes:
        """Return a page of rollouts as JSON."""
        return encode(search(self.folder, self._steps, query, start)).encode("utf-8", "replace")

    def rollout(self, place: Place) -> bytes:
        """Return an episode as JSON."""
        return encode(whole_episode(self.folder, place)).encode("utf-8", "replace")
