"""A group of workers on any cluster: calls, deadlines and errors.

Who waits for whom: each worker has a thread in this process, which sends it one call at a time and waits for the answer
through a ``Link``; workers of this process share its compute thread. The event loop waits for these threads through
futures and is never blocked by them.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from whet.base.errors import DeadlineError, WhetError, WorkerError, WorkerStuckError
from whet.cluster.base import Placement
from whet.processes.threads import JobThread

T = TypeVar("T")

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds for a worker's close
_GIVEN_UP = 3.0  # the same for a worker that is still busy with an abandoned call
_TURN = 10.0  # seconds that a shard's message waits for the one before it
_AFTERMATH = 2.0  # seconds after a rank's failure in which the death of another rank is taken as its cause


class RemoteTraceback(Exception):
    """The cause of an exception from another process: the place and the traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.where = text, "another process"

    def __str__(self) -> str:
        return f"in {self.where}\n{self.text}"


class Call:
    """A method's name and its arguments, which are serialised once for all ranks that get them. ``of_shard``: only the
    first rank of a shard sends its result. Calls with the same ``turn`` are serialised and sent one after the other, so
    that this process never holds the messages of all shards; a rank that does not take its message in time does not
    keep the others from theirs."""

    def __init__(
        self,
        method: str,
        args: tuple[object, ...],
        ranks: int,
        of_shard: bool = False,
        turn: threading.Semaphore | None = None,
    ) -> None:
        self.method, self.args, self.of_shard = method, args, of_shard
        self._lock, self._turn, self._left = threading.Lock(), turn or threading.Semaphore(), ranks
        self._packed: Any = None
        self._in_turn = False

    @contextmanager
    def packed(self, pack: Callable[[str, tuple[object, ...], bool], T]) -> Iterator[T]:
        """Yield ``pack(method, args, of_shard)``, computed by the first caller, until it is sent; the last rank drops
        it. All ranks have the same ``pack``."""
        with self._lock:
            if self._packed is None:
                self._in_turn = self._turn.acquire(timeout=_TURN)
                try:
                    self._packed = pack(self.method, self.args, self.of_shard)
                except BaseException:
                    self._end_turn()
                    raise
            packed: T = self._packed
        try:
            yield packed
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._packed = None
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._in_turn:
            self._in_turn = False
            self._turn.release()


class Link(Protocol):
    """The connection to one worker. One thread builds and calls; any thread may call ``end`` at any time."""

    @property
    def thread(self) -> JobThread | None:
        """A shared thread that builds and calls; None: a separate thread."""
        ...

    @property
    def where(self) -> str:
        """The worker's process, for messages; empty for this process."""
        ...

    def build(self) -> None:
        """Return when the worker is built. Raises the error of its constructor."""
        ...

    def call(self, call: Call) -> object:
        """Return the result. Raises the worker's exception, or ``WorkerError`` if it died."""
        ...

    def end(self) -> None:
        """Return when the worker has ended. Must work while a call is in progress."""
        ...


class LinkedGroup:
    """A ``WorkerGroup`` with one link per rank."""

    def __init__(self, worker: type, placement: Placement, links: Sequence[Link]) -> None:
        self.placement = placement
        self._name = worker.__name__
        self._closed = False
        self._ranks = [_Rank(f"{worker.__name__}-{rank}", link) for rank, link in enumerate(links)]

    async def call(self, method: str, *args: object, deadline: float | None = None) -> list[object]:
        self._check_open(method)
        return await self._run(self._to_all(method, args), deadline)

    async def scatter(
        self, method: str, shards: Sequence[object], *args: object, deadline: float | None = None
    ) -> list[object]:
        self._check_open(method)
        if len(shards) != self.placement.shards:
            raise ValueError(
                f"{self._name}.{method}: {len(shards)} shards for {self.placement.shards} data-parallel ranks"
            )
        each, turn = self.placement.ranks_per_shard, threading.Semaphore()
        calls = [Call(method, (shard, *args), each, True, turn) for shard in shards]
        results = await self._run([call for call in calls for _ in range(each)], deadline)
        return results[::each]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        seconds = _GIVEN_UP if any(rank.doing for rank in self._ranks) else _CLOSING
        try:
            await self._run(self._to_all("close", ()), min(seconds, self.placement.deadline))
        except (DeadlineError, WorkerError) as error:  # must not hide the error that caused the closing
            log.warning("%s", error)
        finally:
            await asyncio.gather(*(asyncio.to_thread(rank.end) for rank in self._ranks))

    def _to_all(self, method: str, args: tuple[object, ...]) -> list[Call]:
        return [Call(method, args, self.placement.ranks)] * self.placement.ranks

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise WhetError(f"{self._name}.{method} was called after the group was closed")

    async def _run(self, calls: list[Call], deadline: float | None) -> list[object]:
        seconds = self.placement.deadline if deadline is None else deadline
        busy = [rank.busy for rank in self._ranks]
        futures = [rank.submit(call) for rank, call in zip(self._ranks, calls, strict=True)]
        waits = [asyncio.wrap_future(future) for future in futures]
        try:
            done, pending = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            first = next((rank for rank, wait in enumerate(waits) if wait in done and _error(wait)), None)
            if first is not None:
                if pending and not isinstance(_error(waits[first]), WorkerError):
                    await asyncio.wait(pending, timeout=min(seconds, _AFTERMATH))
                self._raise(calls[0].method, waits, first)
            if pending:
                late = [rank for rank, wait in enumerate(waits) if wait in pending]
                raise WorkerStuckError(self._too_late(calls[0].method, seconds, late, busy))
            return [wait.result() for wait in waits]
        finally:
            for future, wait in zip(futures, waits, strict=True):
                future.cancel()  # calls that have not begun must not run after the caller gave up
                wait.cancel()  # asyncio must not report results that were never retrieved

    def _raise(self, method: str, waits: "Sequence[asyncio.Future[object]]", first: int) -> None:
        failures = {rank: _error(wait) for rank, wait in enumerate(waits) if wait.done()}
        rank = next((rank for rank, error in failures.items() if isinstance(error, WorkerError)), first)
        error = failures[rank]
        assert error is not None
        if isinstance(error, WorkerError):
            raise WorkerError(
                f"{self._name}.{method} failed because rank {self._describe(rank)} is gone: {error}; find out what "
                "ended it (memory, a signal, the node) and resume the run"
            ) from error
        if isinstance(error.__cause__, RemoteTraceback):
            error.__cause__.where = f"{self._name}.{method} on rank {self._describe(rank)}"
        raise error

    def _too_late(self, method: str, seconds: float, late: list[int], busy: list[str | None]) -> str:
        ranks = " and rank ".join(self._describe(rank) for rank in late[:3]) + (" and others" if len(late) > 3 else "")
        where = f" on rank {ranks}" if len(self._ranks) > 1 or self._ranks[0].where else ""
        before = next((busy[rank] for rank in late if busy[rank]), None)
        behind = f" (it was still busy with {before} when the call was made)" if before else ""
        return (
            f"{self._name}.{method} did not finish within its deadline of {seconds:g} s{where}{behind}; "
            "raise the deadline if the work takes that long, otherwise find out what hangs"
        )

    def _describe(self, rank: int) -> str:
        where = self._ranks[rank].where
        return f"{rank} of {len(self._ranks)}" + (f" ({where})" if where else "")


def _error(wait: "asyncio.Future[object]") -> BaseException | None:
    """Return the exception of a finished call; closing the group cancels calls that wait for the worker's
    construction."""
    return WorkerError("the group was closed while it was built") if wait.cancelled() else wait.exception()


class _Rank:
    """One worker, and the thread that runs its calls."""

    def __init__(self, name: str, link: Link) -> None:
        self._link, self._thread = link, link.thread or JobThread(name)
        self._failure: BaseException | None = None  # the error of its construction, or of its death
        self._unfinished: dict[Future[Any], str] = {}  # calls in order, with their methods
        self._submit(self._build, "its construction")

    @property
    def where(self) -> str:
        return self._link.where

    @property
    def busy(self) -> str | None:
        """The job that a new call would wait for."""
        return self.doing or self._thread.doing

    @property
    def doing(self) -> str | None:
        """The method that this worker runs now, or will run next."""
        return next(iter(self._unfinished.copy().values()), None)

    def submit(self, call: Call) -> Future[object]:
        return self._submit(partial(self._call, call), call.method)

    def end(self) -> None:
        """End the worker at once, in any state."""
        self._link.end()
        if self._link.thread is None:
            self._thread.end()
        else:
            self._thread.give_up(self._unfinished.copy())

    def _submit(self, work: Callable[[], object], name: str) -> Future[object]:
        future = self._thread.submit(work, name=name)
        self._unfinished[future] = name
        future.add_done_callback(self._unfinished.pop)
        return future

    def _build(self) -> None:
        try:
            self._link.build()
        except BaseException as error:
            self._failure = error

    def _call(self, call: Call) -> object:
        if self._failure is not None:
            if call.method == "close":
                return None
            raise self._failure
        try:
            return self._link.call(call)
        except WorkerError as error:
            self._failure = error
            raise


def call_method(worker: object, method: str, args: tuple[object, ...]) -> object:
    """Return the result of a method of the worker or of one of its attributes (``state.save``); None for a ``close``
    that it doesn't have."""
    if method == "close" and not hasattr(worker, "close"):
        return None
    return attrgetter(method)(worker)(*args)
