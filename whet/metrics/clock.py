"""Timing: seconds per phase of a step, tokens per second, and the time left. Independent of sinks and the loop.

One task, the *owner*, runs the training loop. Its phases are exclusive: an inner phase pauses the outer one, so that
they and ``time/other`` sum to ``time/step``. Phases of other tasks or threads (rollouts in the background) overlap with
them and are reported separately, as the time in which at least one was open.

``episodes.jsonl`` of a run folder has when each episode was played: one line per episode, in the order of their ends.
Lines stay when a run is resumed: an episode that was played again took its time twice.
"""

import asyncio
import heapq
import json
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from whet.base.files import append
from whet.config.typed import check_types

_Caller = tuple[int, int]  # thread and task


@dataclass(slots=True)
class Played:
    """When an episode was played, for the timeline of a run."""

    name: str
    lane: int  # the lowest number that no other episode had at the same time
    began: float  # Unix time
    seconds: float = 0.0
    status: str = "cancelled"
    tokens: int = 0  # sampled ones


@dataclass(slots=True)
class Timing:
    """Waiting times and losses of episodes, summed over all episodes (which overlap)."""

    begun: float = field(default_factory=time.perf_counter)
    passed: float = 0.0  # seconds of a lap
    generating: float = 0.0  # seconds
    grading: float = 0.0  # seconds
    sampling: float = 0.0  # seconds in which at least one episode waited for the running generator
    played: list[Played] = field(default_factory=list)  # episodes that ended
    failures: Counter[str] = field(default_factory=Counter)  # failed attempts, by the kind of error
    lost: int = 0  # tokens that were sampled in failed attempts
    progress: int = 0  # replies and ended episodes so far; never reset
    _open: int = 0  # episodes that wait for the generator now
    _resting: bool = False
    _free_lanes: list[int] = field(default_factory=list)  # a heap
    _lanes: int = 0
    _since: float | None = None  # last update of ``sampling``; None: no episode waits, or the generator is stopped

    @contextmanager
    def waiting_for_generator(self) -> Iterator[None]:
        """Count the time spent inside."""
        started = time.perf_counter()
        self._open += 1
        self._settle(started)
        try:
            yield
        finally:
            now = time.perf_counter()
            self.generating += now - started
            self.progress += 1
            self._open -= 1
            self._settle(now)

    @contextmanager
    def episode(self, name: str) -> Iterator[Played]:
        """Record when an episode was played; the caller fills in its end."""
        if not self._free_lanes:
            heapq.heappush(self._free_lanes, self._lanes)
            self._lanes += 1
        played, began = Played(name, heapq.heappop(self._free_lanes), time.time()), time.perf_counter()
        try:
            yield played
        finally:
            played.seconds = time.perf_counter() - began
            self.progress += 1
            heapq.heappush(self._free_lanes, played.lane)
            self.played.append(played)

    def rest(self, resting: bool) -> None:
        """Record that the generator stops, or continues."""
        self._resting = resting
        self._settle(time.perf_counter())

    def lap(self) -> "Timing":
        """Return the sums, and reset them."""
        now = time.perf_counter()
        self._settle(now)
        past = replace(self, passed=now - self.begun)
        self.begun = now
        self.generating = self.grading = self.sampling = 0.0
        self.failures, self.lost, self.played = Counter(), 0, []
        return past

    def _settle(self, now: float) -> None:
        if self._since is not None:
            self.sampling += now - self._since
        self._since = now if self._open and not self._resting else None


class Clock:
    """A stopwatch of seconds per phase and step.

    >>> clock = Clock()
    >>> with clock.phase("learn"):
    ...     pass
    >>> sorted(clock.lap())
    ['time/learn', 'time/other', 'time/step']
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._owner: _Caller | None = None
        self._begun = self._seen = now()
        self._stack: list[str] = []  # open phases of the owner, the innermost last
        self._exclusive: dict[str, float] = defaultdict(float)
        self._open: dict[str, int] = defaultdict(int)  # number of open phases of other tasks
        self._since: dict[str, float] = {}
        self._overlap: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        """Make the calling task the owner and begin the first step now. Otherwise, the first task that opens a phase
        is the owner, and the first step begins with the clock."""
        with self._lock:
            self._owner = _caller()
            self._begun = self._seen = self._now()
            self._exclusive.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside as ``name``; of nested phases the innermost counts."""
        if name in ("step", "other") or name.startswith("overlap/"):
            raise ValueError(f"a phase can't be called {name!r}: the clock reports that name itself")
        with self._lock:
            caller = _caller()
            if self._owner is None:
                self._owner = caller
            by_owner = caller == self._owner
            now = self._now()
            if by_owner:
                self._settle(now)
                self._stack.append(name)
            else:
                if not self._open[name]:
                    self._since[name] = now
                self._open[name] += 1
        try:
            yield
        finally:
            with self._lock:
                now = self._now()
                if by_owner:
                    self._settle(now)
                    self._stack.pop()
                else:
                    self._open[name] -= 1
                    if not self._open[name]:
                        self._overlap[name] += now - self._since.pop(name)

    def lap(self) -> dict[str, float]:
        """End the step. Return seconds by ``time/<phase>``, ``time/other``, ``time/step``, ``time/overlap/<phase>``.

        The time of open phases until now belongs to this step, the rest to the next."""
        with self._lock:
            now = self._now()
            self._settle(now)
            for name in self._since:
                self._overlap[name] += now - self._since[name]
                self._since[name] = now
            step = now - self._begun
            result = {f"time/{name}": seconds for name, seconds in self._exclusive.items()}
            result["time/other"] = max(0.0, step - sum(self._exclusive.values()))
            result["time/step"] = step
            result |= {f"time/overlap/{name}": seconds for name, seconds in self._overlap.items()}
            self._exclusive.clear()
            self._overlap.clear()
            self._begun = now
            return result

    def _settle(self, now: float) -> None:
        if self._stack:
            self._exclusive[self._stack[-1]] += now - self._seen
        self._seen = now


class Pace:
    """Throughput and time left, from the median of the last steps, so that a single slow step (compilation, a
    checkpoint, an evaluation) does not change them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=20)

    def add(self, seconds: float, tokens: float) -> None:
        self._steps.append((seconds, tokens))

    def tokens_per_second(self) -> float:
        """Return the median over the last steps; 0 before the first."""
        rates = [tokens / seconds for seconds, tokens in self._steps if seconds > 0]
        return statistics.median(rates) if rates else 0.0

    def eta(self, steps_left: int) -> float | None:
        """Return the estimated seconds for ``steps_left`` steps; None before the first step."""
        if not self._steps:
            return None
        return max(0, steps_left) * statistics.median(seconds for seconds, _ in self._steps)


def _caller() -> _Caller:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), id(task) if task else 0


FILE = "episodes.jsonl"


def write_played(folder: Path, step: int, played: Iterable[Played]) -> None:
    """Append the episodes that ended in a step."""
    if lines := "".join(json.dumps({"step": step} | asdict(episode)) + "\n" for episode in played):
        append(folder / FILE, lines)


def read_played(folder: Path) -> Iterator[tuple[int, Played]]:
    """Yield the step and the times of each episode. Lines that a kill left incomplete are skipped; without a file
    nothing is yielded."""
    try:
        file = (folder / FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                values = json.loads(line)
                step = values.pop("step")
                check_types(Played, values)
                yield int(step), Played(**values)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
