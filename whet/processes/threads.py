"""A thread that runs jobs one after the other. Knows nothing of what they do.

Who waits for whom: whoever submits gets a future at once. Jobs run in the order in which they came. Turns are short
jobs that come again and again (a decode step submits the next one): where both wait, jobs and turns alternate, and a
long job lets waiting turns in between two of its parts (``let_turns``), for as long as its last part took. A job that
hangs can't be stopped, but ``give_up`` leaves its thread behind: a new one goes on with what waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(slots=True, frozen=True)
class _Job:
    name: str
    work: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)


class JobThread:
    """Starts with the first job. A daemon: a job that hangs must not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prepare: Callable[[], object] | None = None  # called once on each thread that starts from now on
        self._changed = threading.Condition()  # guards the fields below
        self._jobs, self._turns = deque[_Job](), deque[_Job]()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._since = 0.0  # when the running job began, or last let turns in

    @property
    def doing(self) -> str | None:
        """The name of the job that runs now."""
        running = self._running
        return running.name if running else None

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of its jobs."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[*Ts], T], *args: *Ts, name: str = "", turn: bool = False) -> Future[T]:
        """Run ``work(*args)`` after what waits already; cancelling the future works until it begins. ``name`` is what
        people are told when others wait for it."""
        future: Future[T] = Future()
        job = _Job(name or named(work), lambda: work(*args), future)
        with self._changed:
            (self._turns if turn else self._jobs).append(job)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return future

    def let_turns(self) -> None:
        """Called by a running job between two parts: run the turns that wait. Does nothing on any other thread."""
        if not self.is_current:
            return
        now = time.monotonic()
        until = 2 * now - self._since
        while self._turns and now < until:
            self._turns.popleft().run()
            now = time.monotonic()
        self._since = now

    def give_up(self, futures: Iterable[Future[Any]]) -> None:
        """Cancel these jobs. One of them that is running is left behind: a new thread goes on with what waits, and the
        old one ends with the job."""
        with self._changed:
            unfinished = [future for future in futures if not future.cancel()]
            if self._running is not None and self._running.future in unfinished:
                self._running = None
                self._start()

    def end(self) -> None:
        """End the thread after the job that is running; those that wait are cancelled."""
        with self._changed:
            waiting = [*self._jobs, *self._turns]
            self._jobs.clear()
            self._turns.clear()
            self._thread = self._running = None
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self.prepare is not None:
            self.prepare()
        turn = False
        while (job := self._next(turn)) is not None:
            turn = not turn
            job.run()
            del job  # a finished job must not keep its arguments alive

    def _next(self, turn: bool) -> _Job | None:
        """Wait for a job; from the turns first where it is their time. None: this thread is not wanted any more."""
        with self._changed:
            me = threading.current_thread()
            if self._thread is me:
                self._running = None
            self._changed.wait_for(lambda: self._thread is not me or self._jobs or self._turns)
            if self._thread is not me:
                return None
            first, second = (self._turns, self._jobs) if turn else (self._jobs, self._turns)
            self._running = (first or second).popleft()
            self._since = time.monotonic()
            return self._running


def named(work: Callable[..., Any]) -> str:
    """The name of a function, for messages."""
    work = work.func if isinstance(work, partial) else work
    return getattr(work, "__qualname__", type(work).__name__)
