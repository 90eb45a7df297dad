"""The cluster without a cluster: workers are objects of this process, each with a thread of its own.

Who waits for whom: the event loop waits for a worker's thread through a future and is never blocked by it; a worker's
thread waits for its queue and takes one call at a time. Arguments and results are passed, not copied.
"""

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from whet.cluster.base import Placement, Seat, WorkerGroup
from whet.config import Config
from whet.errors import DeadlineError, WhetError


class LocalCluster:
    """Launches workers in this process."""

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        return LocalGroup(worker, config, placement)


class LocalGroup:
    """Workers in threads of this process."""

    def __init__(self, worker: type, config: Config, placement: Placement) -> None:
        self.placement = placement
        self._name = worker.__name__
        self._closed = False
        self._threads: list[_WorkerThread] = []
        for rank in range(placement.ranks):
            seat = Seat(rank, placement.ranks, rank // placement.ranks_per_shard, placement.shards)
            self._threads.append(_WorkerThread(worker, config, seat))

    async def call(self, method: str, *args: Any, deadline: float | None = None) -> list[Any]:
        self._check_open(method)
        return await self._run(method, [args] * self.placement.ranks, deadline)

    async def scatter(self, method: str, shards: list[Any], *args: Any, deadline: float | None = None) -> list[Any]:
        self._check_open(method)
        if len(shards) != self.placement.shards:
            raise ValueError(f"{self._name}.{method}: {len(shards)} shards for {self.placement.shards} shards of ranks")
        each = self.placement.ranks_per_shard
        results = await self._run(method, [(shard, *args) for shard in shards for _ in range(each)], deadline)
        return results[::each]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._run("close", [()] * self.placement.ranks, min(30.0, self.placement.deadline))
        finally:
            for thread in self._threads:
                thread.stop()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise WhetError(f"{self._name}.{method} was called after the group was closed")

    async def _run(self, method: str, arguments: list[tuple[Any, ...]], deadline: float | None) -> list[Any]:
        seconds = self.placement.deadline if deadline is None else deadline
        busy = next((thread.doing for thread in self._threads if thread.doing), None)
        futures = [thread.submit(method, args) for thread, args in zip(self._threads, arguments, strict=True)]
        gathered = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return await gathered
        except TimeoutError:
            if not timeout.expired():  # the worker's own
                raise
            behind = f" (it was still busy with {busy} when the call was made)" if busy else ""
            raise DeadlineError(
                f"{self._name}.{method} did not finish within its deadline of {seconds:g} s{behind}; "
                "raise the deadline if the work is that long, else look for what hangs"
            ) from None
        finally:
            for future in futures:
                future.cancel()  # what has not begun must not run behind the back of a caller who gave up


class _WorkerThread:
    """One worker and the thread that builds it, calls it and closes it."""

    def __init__(self, worker: type, config: Config, seat: Seat) -> None:
        self.doing: str | None = "its construction"  # the method that runs now
        self._calls: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        self._worker: Any = None
        self._failure: BaseException | None = None  # what building it raised
        # A daemon: a worker that hangs must not keep the process from ending.
        threading.Thread(
            target=self._loop, args=(worker, config, seat), name=f"{worker.__name__}-{seat.rank}", daemon=True
        ).start()

    def submit(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, method, args))
        return future

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    def _loop(self, worker: type, config: Config, seat: Seat) -> None:
        try:
            self._worker = worker(config, seat)
        except BaseException as error:
            self._failure = error
        self.doing = None
        while (call := self._calls.get()) is not None:
            self._serve(*call)
            del call  # a finished call must not keep its arguments alive
        self._worker = None

    def _serve(self, future: Future[Any], method: str, args: tuple[Any, ...]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self.doing = method
        try:
            result = self._call(method, args)
        except BaseException as error:
            self.doing = None
            future.set_exception(error)
        else:
            self.doing = None
            future.set_result(result)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "close" and not hasattr(self._worker, "close"):
            return None
        if self._failure is not None:
            raise self._failure
        return getattr(self._worker, method)(*args)
