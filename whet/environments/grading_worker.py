"""Calls of functions in worker processes that can be killed: texts written by a model go in, JSON values come out.

An answer may hang a parser, eat the memory or crash the interpreter. That is the answer's fault and costs it its
reward; a worker that cannot start, or a grader with a bug, is an infrastructure failure and raises. A worker contains
runaway computations. It is no sandbox: functions called here must not execute the answer as code.

Who waits for whom: ``GradingPool.call`` waits for one of ``workers`` threads; each call there owns one idle process
and waits for its answer until the deadline. A worker exits when its standard input closes, so it cannot outlive the
parent by more than the CPU seconds of one call. It knows no task set and no reward.
"""

import asyncio
import contextlib
import importlib
import os
import pickle
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from pydantic import Field

from whet.config import Config
from whet.environments.child_process import ChildProcess, to_parent
from whet.errors import DeadlineError, WhetError

OUT_OF_BOUNDS = 70  # exit status of a worker that ran out of memory or stack


class HostileAnswer(WhetError):
    """What was graded broke the grader, twice and in healthy workers. It is worth nothing."""

    score: ClassVar[str]


class GradingTimeout(HostileAnswer):
    """It used up the CPU seconds or the deadline."""

    score = "grading_timeout"


class GradingCrash(HostileAnswer):
    """It killed the worker (memory, recursion, a crash of the interpreter)."""

    score = "grading_crash"


class GradingLimits(Config):
    """How much one graded answer may cost."""

    workers: int = Field(default=2, ge=1, le=1000)
    """Processes, started when first needed."""
    cpu_s: int = Field(default=5, ge=1)
    """CPU time of one call, in seconds."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Wall clock of one call, in seconds; generous, for machines that are busy."""
    start_s: float = Field(default=120.0, gt=0)
    """Wall clock until a new worker is ready, in seconds."""
    memory_gib: float = Field(default=4.0, gt=0)
    """Address space of a worker."""


class GradingPool:
    """A few workers, started lazily and replaced when they die. Survives pickling (without its processes) and
    belongs to no event loop.

    >>> pool = GradingPool()
    >>> await pool.call(operator.add, 2, 3)
    5
    """

    def __init__(self, prepare: Callable[[], None] | None = None, limits: GradingLimits | None = None):
        """``prepare`` runs once in every new worker, outside the limits of a call: slow imports belong there."""
        self.prepare = prepare
        self.limits = limits or GradingLimits()
        self.restarts = 0  # workers that were lost and had to be replaced
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return GradingPool, (self.prepare, self.limits)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, run in a worker. The function is importable by name, its result is a JSON value.

        Raises ``GradingTimeout`` or ``GradingCrash`` when the arguments break healthy workers, ``WhetError`` when the
        worker cannot start or the function raises.
        """
        request = pickle.dumps((_name(function), args, self.limits.cpu_s))
        with self._lock:
            if self._closed:
                raise WhetError("the grading pool is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="whet-grading")
            future = self._threads.submit(self._call, request)
        return await asyncio.wrap_future(future)

    async def scores(self, function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
        """The scores that ``function`` gives; for a hostile answer a reward of 0 and the reason as a score of 1."""
        try:
            return await self.call(function, *args)
        except HostileAnswer as failure:
            return {"reward": 0.0, "correct": 0.0, "format": 1.0, failure.score: 1.0}

    def close(self) -> None:
        """Kill the workers. Calls under way raise ``WhetError``."""
        with self._lock:
            self._closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _call(self, request: bytes) -> Any:
        failure: HostileAnswer | None = None
        for attempt in range(2):
            worker = self._take(fresh=attempt > 0)
            try:
                reply = worker.exchange(request, self.limits.deadline_s)
            except DeadlineError:
                self._lose(worker)
                failure = GradingTimeout(f"grading hit its deadline of {self.limits.deadline_s:g} s")
            except EOFError:
                self._lose(worker)
                if worker.exit_status == -signal.SIGXCPU:
                    raise GradingTimeout(f"grading used up its {self.limits.cpu_s} CPU seconds") from None
                failure = GradingCrash(f"the grading worker died ({worker.exit_status})")
            else:
                if "error" in reply:
                    raise WhetError(f"grading failed in its worker, which is a bug of the grader:\n{reply['error']}")
                return reply["result"]
            finally:
                self._give_back(worker)
            if self._closed:
                raise WhetError("the grading pool was closed while it graded")
        self._give_back(self._take(fresh=True))  # raises if workers cannot start: then nobody's answer is to blame
        assert failure is not None
        raise failure

    def _take(self, fresh: bool) -> "_Worker":
        with self._lock:
            if self._closed:
                raise WhetError("the grading pool is closed")
            worker = self._idle.pop() if self._idle and not fresh else None
        worker = worker or _Worker(self.prepare, self.limits)
        with self._lock:
            self._busy.add(worker)
            closed = self._closed
        if closed:
            worker.kill()
        return worker

    def _lose(self, worker: "_Worker") -> None:
        worker.kill()
        with self._lock:
            self.restarts += not self._closed

    def _give_back(self, worker: "_Worker") -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.alive and not self._closed and len(self._idle) < self.limits.workers:
                self._idle.append(worker)
                return
        worker.kill()


class _Worker(ChildProcess):
    """One process that can call functions. Requests are pickled."""

    def __init__(self, prepare: Callable[[], None] | None, limits: GradingLimits):
        super().__init__(__name__)
        hello = pickle.dumps((_name(prepare) if prepare else None, int(limits.memory_gib * 2**30)))
        try:
            reply = self.exchange(hello, limits.start_s)
        except (EOFError, DeadlineError) as problem:
            self.kill()
            raise WhetError(
                f"a grading worker could not start ({problem or 'it exited'}; exit status {self.exit_status}); "
                "see its messages above, and give it more memory_gib or start_s if it needs them"
            ) from None
        if "error" in reply:
            self.kill()
            raise WhetError(f"a grading worker could not start:\n{reply['error']}")


def serve() -> None:
    """The worker's life: prepare, then answer requests until standard input closes."""
    receive, reply = to_parent()

    def run(name: tuple[str, str] | None, args: tuple[Any, ...]) -> None:
        try:
            reply(result=_resolve(name)(*args) if name else None)
        except (MemoryError, RecursionError):
            os._exit(OUT_OF_BOUNDS)
        except Exception:
            reply(error=traceback.format_exc(limit=-5))

    hello = receive()
    if hello is None:
        return
    prepare, memory = pickle.loads(hello)
    _limit(resource.RLIMIT_AS, memory)
    run(prepare, ())
    while (request := receive()) is not None:
        name, args, cpu_s = pickle.loads(request)
        # The kernel keeps this limit even while a huge power holds the interpreter, and when the parent is gone.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + cpu_s + 1)
        run(name, args)


def _limit(kind: int, value: int) -> None:
    """Lower a soft limit. Systems that lack this limit leave the wall-clock deadline to do the work."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a function that another process can import."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        raise WhetError(
            f"the grading worker cannot import {function!r}: it must be a top-level function of a module "
            "that can be imported, not a lambda, a local function or one of the script that was started"
        )
    return module, name


def _resolve(name: tuple[str, str]) -> Callable[..., Any]:
    module, path = name
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
