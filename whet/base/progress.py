"""How far this process is. The parts of a run report here what they do and how much of it is done; a live display, or
a line of text every now and then, shows it to people. Knows no screen and no loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Count:
    """How much of something is done: either the part that counts adds to ``done``, or ``measure`` returns it."""

    def __init__(self, unit: str, total: int, measure: Callable[[], int] | None = None) -> None:
        self.unit, self.total, self.done, self._measure = unit, total, 0, measure

    def read(self) -> int:
        """Return how much is done now."""
        return min(self.total, self.done if self._measure is None else self._measure())

    @property
    def share(self) -> float:
        return self.read() / max(1, self.total)


class Progress:
    """One activity at a time, and counts inside of it, the outermost first. Any thread may report and read.

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
        self._took: dict[str, float] = {}  # seconds of each activity, the last time
        self._clear: Callable[[], None] | None = None
        self.where = ""  # for example the step, in front of the activity
        self.drawn = False  # a live display shows it
        self.told_at = now()  # when people last read something

    def begin(self, activity: str) -> None:
        """From now on this is done, until the next one begins."""
        with self._lock:
            now = self.now()
            self._took[self._activity] = now - self._since
            self._activity, self._since = activity, now
            self._counts.clear()

    def count(self, unit: str, total: int, measure: Callable[[], int] | None = None) -> Count:
        """Count until the next activity begins; ``unit`` is in the plural. ``measure`` is called by other threads."""
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
        """Yield the items, counting those that are done."""
        with self.counting(unit, len(items)) as count:
            for item in items:
                yield item
                count.done += 1

    def text(self) -> str:
        """Return the activity, how much of it is done, and how long the rest will take."""
        with self._lock:
            spent, left = self.now() - self._since, self._left()
            counts = [f"{one.read()} of {one.total} {one.unit}" for one in self._counts if one.total > 1]
            activity = self._activity
        time_left = f"{about(spent)} so far" if left is None else f"about {about(left)} left"
        return f"{activity}: {', '.join([*counts, time_left])}"

    def _left(self) -> float | None:
        """Estimate the seconds that are left: from the last time, or from what is counted."""
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

    def told(self) -> None:
        """People have just read a line."""
        self.told_at = self.now()

    def on_take_over(self, clear: Callable[[], None] | None) -> None:
        """``clear`` is called when a live display takes the screen."""
        self._clear = clear

    def draw(self, drawn: bool) -> None:
        """A live display takes the screen, or leaves it."""
        if drawn and self._clear is not None:
            self._clear()
        self.drawn = drawn
        self.told()


PROGRESS = Progress()
"""That of this process."""


def about(seconds: float) -> str:
    """Write a time roughly.

    >>> about(3), about(42), about(130), about(7300)
    ('3 s', '40 s', '2 min', '2 h 2 min')
    """
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{round(seconds, -1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
