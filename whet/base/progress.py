"""The progress of this process. The parts of a run report their current activity and how much of it is done; a live
display or an occasional line of text shows it. Has no dependency on the display or the training loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Count:
    """Units done out of a total: the caller increments ``done``, or ``measure`` returns the number."""

    def __init__(self, unit: str, total: int, measure: Callable[[], int] | None = None) -> None:
        self.unit, self.total, self.done, self._measure = unit, total, 0, measure

    def read(self) -> int:
        """Return the number of units done."""
        return min(self.total, self.done if self._measure is None else self._measure())

    @property
    def share(self) -> float:
        return self.read() / max(1, self.total)


class Progress:
    """One activity at a time with nested counts, the outermost first. Any thread may report and read.

    >>> progress = Progress()
    >>> progress.begin("evaluating")
    >>> with progress.counting("answers", 200) as count:
    ...     count.done = 37
    ...     print(progress.text().partition(",")[0])
    evaluating: 37 of 200 answers
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self._lock = now, threading.Lock()
        self._activity, self._since = "", now()
        self._counts: list[Count] = []
        self._counted = (0.0, 0.0)  # when the outermost count began, and its share then
        self._took: dict[str, float] = {}  # seconds that each activity took the last time
        self._clear: Callable[[], None] | None = None
        self.where = ""  # printed before the activity, e.g. the step
        self.drawn = False  # whether a live display shows it
        self.printed_at = now()  # when something was last printed

    def begin(self, activity: str) -> None:
        """Start an activity, which lasts until the next one begins."""
        with self._lock:
            now = self.now()
            self._took[self._activity] = now - self._since
            self._activity, self._since = activity, now
            self._counts.clear()

    @contextmanager
    def within(self, activity: str) -> Iterator[None]:
        """Show another activity until the block ends, then the one before it, whose time does not count the block."""
        with self._lock:
            outer, spent, took = self._activity, self.now() - self._since, self._took.copy()
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(outer)
            with self._lock:
                self._since -= spent
                self._took = took | {activity: self._took[activity]}

    def count(self, unit: str, total: int, measure: Callable[[], int] | None = None) -> Count:
        """Count until the next activity begins. ``unit`` is a plural noun. ``measure`` is called by other threads."""
        count = Count(unit, total, measure)
        with self._lock:
            if not self._counts:
                self._counted = self.now(), count.share
            self._counts.append(count)
        return count

    @contextmanager
    def counting(self, unit: str, total: int) -> Iterator[Count]:
        """Count until the block ends."""
        count = self.count(unit, total)
        try:
            yield count
        finally:
            with self._lock:
                if count in self._counts:
                    self._counts.remove(count)

    def each(self, items: Sequence[T], unit: str) -> Iterator[T]:
        """Yield the items and count the finished ones."""
        with self.counting(unit, len(items)) as count:
            for item in items:
                yield item
                count.done += 1

    def text(self) -> str:
        """Return the activity, how much of it is done, and how long the rest will take."""
        with self._lock:
            spent, left = self.now() - self._since, self._left()
            counts = [f"{count.read()} of {count.total} {count.unit}" for count in self._counts if count.total > 1]
            activity = self._activity
        time_left = f"{about(spent)} so far" if left is None else f"about {about(left)} left"
        return f"{activity}: {', '.join([*counts, time_left])}"

    def _left(self) -> float | None:
        """Estimate the seconds left, from the last run of this activity or from its counts."""
        now = self.now()
        before = self._took.get(self._activity, 0.0) - (now - self._since)
        if before > 0:
            return before
        if not self._counts:
            return None
        share, part = 0.0, 1.0
        for count in self._counts:
            share += part * count.share
            part /= max(1, count.total)
        begun, first = self._counted
        return (1 - share) * (now - begun) / (share - first) if share > first else None

    def mark_printed(self) -> None:
        """Record that a line was just printed."""
        self.printed_at = self.now()

    def on_take_over(self, clear: Callable[[], None] | None) -> None:
        """Call ``clear`` when a live display takes over the screen."""
        self._clear = clear

    def draw(self, drawn: bool) -> None:
        """Record that a live display takes over the screen, or releases it."""
        if drawn and self._clear is not None:
            self._clear()
        self.drawn = drawn
        self.mark_printed()


PROGRESS = Progress()
"""The progress of this process."""


def about(seconds: float) -> str:
    """Format an approximate duration.

    >>> about(3), about(42), about(130), about(7300)
    ('3 s', '40 s', '2 min', '2 h 2 min')
    """
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{round(seconds, -1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
