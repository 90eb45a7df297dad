"""Threads for blocking work: ``JobThread`` runs jobs one after the other; ``run_in_thread`` runs a single call.

Who waits for whom: a job's submitter gets a future at once. Jobs run in the order of submission. Turns are short jobs
that recur (a decode step submits the next one): if both wait, jobs and turns alternate, and a long job runs waiting
turns between two of its parts (``yield_to_decoder``), for as long as its last part took. A job that hangs can't be
stopped, but ``give_up`` abandons its thread: a new one continues with the waiting jobs. A caller that gives up on
``run_in_thread`` abandons its thread, which delays neither the end of the process nor other calls.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from whet.processes.loop_thread import UserCodeExit, format_error

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def outcome_of(future: "Future[T]") -> T:
    """Return the result of a future of another thread, or raise its error with the lines that raised it: asyncio
    replaces a ``TimeoutError`` by a new one."""
    try:
        return await asyncio.wrap_future(future)
    except TimeoutError:
        if future.done() and not future.cancelled() and isinstance(error := future.exception(), TimeoutError):
            raise error from None
        raise


def _passed_on(error: BaseException) -> BaseException:
    """Return the error for a future. asyncio passes no ``StopIteration`` to a waiting coroutine, which would wait for
    ever: as Python does where a coroutine raises it, it becomes the cause of a ``RuntimeError``."""
    if not isinstance(error, StopIteration):
        return error
    replaced = RuntimeError("the call raised StopIteration: next() found no further item")
    replaced.__cause__ = error
    return replaced


async def run_in_thread(call: Callable[[], T], name: str) -> T:
    """Return ``call()``, run in a new thread. Raises the exception of the call, ``UserCodeExit`` for one that is not an
    ``Exception``."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the call continues if the caller is cancelled

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(_passed_on(error))
        except BaseException as error:
            future.set_exception(UserCodeExit(format_error(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome_of(future)


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
            self.future.set_exception(_passed_on(error))


class JobThread:
    """A daemon thread, started with the first job: a job that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prepare: Callable[[], object] | None = None  # called once on each thread that is started later
        self._changed = threading.Condition()  # guards the fields below
        self._jobs, self._turns = deque[_Job](), deque[_Job]()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._since = 0.0  # when the running job began, or last ran turns

    @property
    def doing(self) -> str | None:
        """The name of the running job."""
        running = self._running
        return running.name if running else None

    @property
    def is_current(self) -> bool:
        """The caller runs in one of its jobs."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[*Ts], T], *args: *Ts, name: str = "", turn: bool = False) -> Future[T]:
        """Run ``work(*args)`` after the waiting jobs; the future can be cancelled until then. ``name`` is used in
        messages about the job."""
        future: Future[T] = Future()
        job = _Job(name or named(work), lambda: work(*args), future)
        with self._changed:
            (self._turns if turn else self._jobs).append(job)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return future

    def yield_to_decoder(self) -> None:
        """Run waiting turns; called by a running job between two parts. Does nothing on any other thread."""
        if not self.is_current:
            return
        now = time.monotonic()
        until = 2 * now - self._since
        while now < until and (turn := self._next_turn()) is not None:
            turn.run()
            now = time.monotonic()
        self._since = now

    def _next_turn(self) -> _Job | None:
        with self._changed:  # ``end`` empties the turns
            return self._turns.popleft() if self._turns else None

    def give_up(self, futures: Iterable[Future[object]]) -> None:
        """Cancel these jobs. If one is running, its thread is abandoned: a new thread continues with the waiting jobs,
        and the old one ends with the job."""
        with self._changed:
            unfinished = [future for future in futures if not future.cancel()]
            if self._running is not None and self._running.future in unfinished:
                self._running = None
                self._start()

    def end(self) -> None:
        """End the thread after the running job, and cancel waiting jobs."""
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
        """Wait for a job, preferably a turn if ``turn``; return None if this thread is to end."""
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


def named(work: Callable[..., object]) -> str:
    """Return the name of a function, for messages."""
    work = work.func if isinstance(work, partial) else work
    return getattr(work, "__qualname__", type(work).__name__)
