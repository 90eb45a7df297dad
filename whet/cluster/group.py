"""A group of workers on any cluster: calls, deadlines and errors.

Who waits for whom: each worker has a thread in this process, which sends it one call at a time and waits for the answer
through a ``Link``; workers of this process share its compute thread. The event loop waits for these threads through
futures and is never blocked by them. While a ``LinkedLead`` is not over, calls of all ranks wait, so that every rank
gets its calls in the same order.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from whet.base.errors import DeadlineError, WhetError, WorkerError, WorkerStuckError
from whet.cluster.base import Placement
from whet.cluster.call import Call, Link, RemoteTraceback
from whet.processes.threads import JobThread

Waits = Mapping[int, "asyncio.Future[object]"]
"""The results of calls, by rank."""

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds for a worker's close
_GIVEN_UP = 3.0  # the same for a worker that is still busy with an abandoned call
_AFTERMATH = 2.0  # seconds after a rank's failure in which the death of another rank is taken as its cause


class LinkedGroup:
    """A ``WorkerGroup`` with one link per rank."""

    def __init__(self, worker: type, placement: Placement, links: Sequence[Link]) -> None:
        self.placement = placement
        self._name = worker.__name__
        self._closed = False
        self._lead: LinkedLead | None = None  # the last one
        self._ranks = [_Rank(f"{worker.__name__}-{rank}", link) for rank, link in enumerate(links)]

    async def call(self, method: str, *args: object) -> list[object]:
        self.check_open(method)
        return await self._run(self._to_all(method, args), self.placement.deadline)

    async def scatter(self, method: str, shards: Sequence[object], *args: object) -> list[object]:
        self.check_open(method)
        if len(shards) != self.placement.shards:
            raise ValueError(
                f"{self._name}.{method}: {len(shards)} shards for {self.placement.shards} data-parallel ranks"
            )
        each, turn = self.placement.ranks_per_shard, threading.Semaphore()
        calls = [Call(method, (shard, *args), each, True, turn) for shard in shards]
        results = await self._run([call for call in calls for _ in range(each)], self.placement.deadline)
        return results[::each]

    def lead(self, method: str, *args: object, until: str) -> "LinkedLead":
        self.check_open(method)
        if self._lead is not None:
            self._lead.abandon()
        self._lead = LinkedLead(self, self._ranks, Call(method, args, self.placement.ranks - 1), until)
        return self._lead

    async def close(self) -> None:
        if self._closed:
            return
        if self._lead is not None:
            self._lead.abandon()
        self._closed = True
        seconds = _GIVEN_UP if any(rank.doing for rank in self._ranks) else _CLOSING
        try:
            await self._run(self._to_all("close", ()), min(seconds, self.placement.deadline))
        except (DeadlineError, WorkerError) as error:  # must not hide the error that caused the closing
            log.warning("%s", error)
        finally:
            await asyncio.gather(*(asyncio.to_thread(rank.end) for rank in self._ranks))

    def check_open(self, method: str) -> None:
        if self._closed:
            raise WhetError(f"{self._name}.{method} was called after the group was closed")

    def busy(self) -> list[str | None]:
        """Return the method that each rank runs now."""
        return [rank.busy for rank in self._ranks]

    async def check(
        self, method: str, waits: Waits, needed: Iterable[int], seconds: float, busy: Sequence[str | None]
    ) -> None:
        """Raise the first error of any rank, or ``WorkerStuckError`` if a ``needed`` one has no result after the
        ``seconds``. ``busy``: the methods that ranks ran when the call was made."""
        first = next((rank for rank, wait in waits.items() if wait.done() and _error(wait)), None)
        if first is not None:
            pending = [wait for wait in waits.values() if not wait.done()]
            if pending and not isinstance(_error(waits[first]), WorkerError):
                await asyncio.wait(pending, timeout=min(seconds, _AFTERMATH))
            self._raise(method, waits, first)
        if late := [rank for rank in needed if not waits[rank].done()]:
            raise WorkerStuckError(self._too_late(method, seconds, late, busy))

    def _to_all(self, method: str, args: tuple[object, ...]) -> list[Call]:
        return [Call(method, args, self.placement.ranks)] * self.placement.ranks

    async def _run(self, calls: list[Call], seconds: float) -> list[object]:
        method = calls[0].method
        while (lead := self._lead) is not None and not lead.over.done():
            if not (await asyncio.wait([lead.over], timeout=seconds))[0]:
                raise DeadlineError(
                    f"{self._name}.{method} did not begin within its deadline of {seconds:g} s, because {lead.method} "
                    "was not ended"
                )
            self.check_open(method)
        busy = self.busy()
        futures = [rank.submit(call) for rank, call in zip(self._ranks, calls, strict=True)]
        waits = {rank: asyncio.wrap_future(future) for rank, future in enumerate(futures)}
        try:
            await asyncio.wait(waits.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            await self.check(method, waits, waits, seconds, busy)
            return [wait.result() for wait in waits.values()]
        finally:
            for future, wait in zip(futures, waits.values(), strict=True):
                future.cancel()  # calls that have not begun must not run after the caller gave up
                wait.cancel()  # asyncio must not report results that were never retrieved

    def _raise(self, method: str, waits: Waits, first: int) -> None:
        failures = {rank: _error(wait) for rank, wait in waits.items() if wait.done()}
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

    def _too_late(self, method: str, seconds: float, late: list[int], busy: Sequence[str | None]) -> str:
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


class LinkedLead:
    """See ``Lead``. A call that was sent stays with its rank even if the caller gives up, because other ranks may wait
    for that rank."""

    def __init__(self, group: LinkedGroup, ranks: Sequence["_Rank"], follow: Call, until: str) -> None:
        loop = asyncio.get_running_loop()
        self._group, self._first, self.method, self._until = group, ranks[0], follow.method, until
        self.over: asyncio.Future[None] = loop.create_future()  # ``until`` was sent, so calls of all ranks may follow
        self._failed: asyncio.Future[None] = loop.create_future()  # a rank that follows has failed
        self._followers = {rank: _sent(ranks[rank], follow) for rank in range(1, len(ranks))}
        for wait in self._followers.values():
            wait.add_done_callback(self._note)

    async def call(self, method: str, *args: object) -> Any:
        self._group.check_open(method)
        seconds, busy = self._group.placement.deadline, self._group.busy()
        first = _sent(self._first, Call(method, args, 1))
        either: list[asyncio.Future[Any]] = [first, self._failed]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done() or not first.done() or _error(first):
            self.abandon()  # the other ranks end, which shows whether one of them is the cause
        await self._group.check(method, {0: first} | self._followers, [0], seconds, busy)
        return first.result()

    async def end(self) -> Any:
        self._group.check_open(self._until)
        seconds, busy = self._group.placement.deadline, self._group.busy()
        waits = {0: self._end()} | self._followers
        await asyncio.wait(waits.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        await self._group.check(self._until, waits, waits, seconds, busy)
        return waits[0].result()

    def abandon(self) -> None:
        if not self.over.done():
            self._end()

    def _end(self) -> "asyncio.Future[object]":
        self.over.set_result(None)
        return _sent(self._first, Call(self._until, (), 1))

    def _note(self, wait: "asyncio.Future[object]") -> None:
        if _error(wait) and not self._failed.done():
            self._failed.set_result(None)


def _sent(rank: "_Rank", call: Call) -> "asyncio.Future[object]":
    """Return the result of a call that runs even if its caller gives up."""
    wait = asyncio.wrap_future(rank.submit(call))
    wait.add_done_callback(_error)  # asyncio must not report errors that were never retrieved
    return wait


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
