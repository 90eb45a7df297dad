"""Function calls in worker processes that can be killed: plain arguments go in, JSON values come out.

Text written by a model may hang a parser, exhaust the memory or crash the interpreter: then the call fails with an
error that says so. A worker that can't start, or a function that raises, is a different error.
A worker limits runaway computations. It is not a sandbox: functions called here must not execute their arguments.

Who waits for whom: ``Pool.call`` waits for one of ``workers`` threads; each of them owns one process and waits for its
reply until the deadline. A worker that was lost is replaced by the next call.
"""

import asyncio
import json
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import Field

from whet.base.errors import CallError, DeadlineError, WhetError
from whet.config import Config
from whet.processes.child import Child, ChildDied, thread_settings

Function = Callable[..., Any] | str
"""A function that can be imported by name, or its name, ``module:name``, if this process must not import it."""

Around = Callable[[Callable[[Sequence[int]], Any]], Any]
"""Wraps one attempt of a call: opens files, passes their descriptors to its argument, which returns the result, and
converts that for the caller."""


class CallTimeout(CallError):
    """A call exceeded its CPU seconds, or twice its deadline."""


class CallCrash(CallError):
    """A call killed two healthy workers (memory, recursion, a crash of the interpreter)."""


class WorkerLimits(Config):
    """The number of workers, and the limits of one call."""

    workers: int = Field(default=2, ge=1, le=1000)
    """Processes, started when first needed."""
    cpu_s: int | None = Field(default=5, ge=1)
    """CPU seconds of one call; None: no limit."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Wall-clock seconds of one call; generous, because the machine may be busy."""
    start_s: float = Field(default=120.0, gt=0)
    """Wall-clock seconds until a new worker is ready."""
    memory_gib: float | None = Field(default=4.0, gt=0, le=1_000_000)
    """Address space of a worker; None: no limit."""


class _OfThread(threading.local):
    """The worker of each thread of a pool."""

    child: Child | None = None


class Pool:
    """A few workers, started when needed and replaced when they die. Belongs to no event loop.

    >>> pool = Pool()
    >>> await pool.call(operator.add, 2, 3)
    5
    """

    def __init__(
        self,
        prepare: Function | None = None,
        limits: WorkerLimits | None = None,
        *,
        arguments: tuple[object, ...] = (),
        threads: int = 1,
        under: Sequence[str] = (),
    ) -> None:
        """``prepare`` runs once in every new worker, with ``arguments`` and without the limits of a call, for slow
        imports. ``threads``: number of threads of a worker; ``under``: prefix of the command, another program that
        starts it."""
        self.limits = limits or WorkerLimits()
        self.restarts = 0  # number of workers lost
        memory = None if self.limits.memory_gib is None else int(self.limits.memory_gib * 2**30)
        self._prepare = pickle.dumps(
            ("whet.processes.pool_worker:set_up", (prepare and _path(prepare), arguments, memory), None)
        )
        self._environment, self._under = thread_settings(threads), under
        self._lock = threading.Lock()
        self.children = set[Child]()  # the running workers
        self._local = _OfThread()
        self._threads = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="whet-pool")
        self.closed = self._started = False

    async def call(self, function: Function, *args: object) -> Any:
        """Return ``function(*args)``, run in a worker. The function is importable by name, its result is a JSON value.

        Raises ``CallError``, ``CallTimeout`` or ``CallCrash`` when the arguments break healthy workers or the function
        raises, ``WhetError`` when no worker can start.
        """
        return await asyncio.wrap_future(self.submit(function, *args))

    def submit(self, function: Function, *args: object, around: Around | None = None) -> Future[Any]:
        """Do the same for callers without an event loop. ``around`` adds open files, whose descriptors are the last
        arguments of the function; their contents never pass through the worker's memory."""
        request = pickle.dumps((_path(function), args, self.limits.cpu_s))
        with self._lock:
            self._check_open()
            return self._threads.submit(self._call, request, around)

    def close(self) -> None:
        """Kill the workers. Calls in progress raise ``WhetError``."""
        with self._lock:
            self.closed = True
            children = list(self.children)
        for child in children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _call(self, request: bytes, around: Around | None) -> object:
        failure: CallError

        def exchange(files: Sequence[int]) -> object:
            return _result(child.exchange(request, self.limits.deadline_s, files))

        for _ in range(2):
            child = self._worker()
            try:
                return around(exchange) if around else exchange(())
            except DeadlineError:
                failure = CallTimeout(f"a call hit its deadline of {self.limits.deadline_s:g} s")
            except ChildDied as death:
                if child.process.returncode == -signal.SIGXCPU:
                    self._lose(child)
                    raise CallTimeout(f"a call exceeded its {self.limits.cpu_s} CPU seconds") from None
                failure = CallCrash(f"the worker {death}")
            self._lose(child)
        self._worker()  # raises if workers can't start: then the call is not the cause
        raise failure

    def _worker(self) -> Child:
        """Return this thread's worker, ready for a call."""
        if (child := self._local.child) is not None:
            if child.alive:
                return child
            self._lose(child)
        child = self._local.child = Child(
            "whet.processes.pool_worker:answering", environment=self._environment, quiet=True, under=self._under
        )
        try:
            with self._lock:
                self._check_open()
                self.children.add(child)
            _result(child.exchange(self._prepare, self.limits.start_s))
        except WhetError as problem:
            self._lose(child)
            kind = CallError if self._started else WhetError  # if workers could start before, another call may work
            raise kind(
                f"a worker process could not start: {problem}; see its messages above, and raise memory_gib or start_s "
                "if it needs more"
            ) from None
        self._started = True
        return child

    def _lose(self, child: Child) -> None:
        child.kill()
        self._local.child = None
        with self._lock:
            self.children.discard(child)
            self.restarts += 1
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise WhetError("the pool of worker processes was closed")


def _result(reply: bytearray) -> object:
    message = json.loads(reply)
    if "error" in message:
        raise CallError(message["error"])
    if "bug" in message:
        raise CallError(f"a function failed in its worker process, which is a bug in the function:\n{message['bug']}")
    return message["result"]


def _path(function: Function) -> str:
    """Return ``module:name`` of a function that another process can import."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        raise WhetError(
            f"a worker process can't import {function!r}: it must be a top-level function of a module that can be "
            "imported, not a lambda, a local function or a function of the started script"
        )
    return f"{module}:{name}"
