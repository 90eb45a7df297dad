"""Closing the parts of a run in the reverse order of their opening; an error in one does not skip the rest. And ending
jobs that run at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

abandoned_threads = list[str]()
"""Names of threads that ignored the request to end. The process must not wait for them when it exits."""

_PATIENCE = 30.0  # seconds for jobs that were cancelled


class Closing(AsyncExitStack):
    """An exit stack that raises the first error and logs errors of closing that follow from it."""

    def closes(self, name: str, close: Callable[[], Awaitable[None] | None]) -> None:
        """Register ``close()``, which may be asynchronous, to be called at the end. ``name`` appears in the log."""

        async def end(_: type[BaseException] | None, first: BaseException | None, __: TracebackType | None) -> None:
            try:
                closing = close()
                if closing is not None:
                    await closing
            except Exception as error:
                if first is None:
                    raise
                log.warning("%s could not be closed: %s: %s", name, type(error).__name__, error)

        self.push_async_exit(end)


async def cancel_all(jobs: Sequence[asyncio.Task[object]]) -> None:
    """Cancel jobs and wait at most 30 seconds for them, because a job may ignore its cancellation."""
    for job in jobs:
        job.cancel()
    if jobs:
        await asyncio.wait(jobs, timeout=_PATIENCE)


async def gather_or_cancel(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Run the calls at once and return their results, in order. After an error of one, or if the caller is cancelled,
    the others are cancelled, once, and have ended when this raises (see ``cancel_all``)."""
    jobs = [asyncio.create_task(call) for call in calls]
    for job in jobs:
        job.add_done_callback(lambda job: job.cancelled() or job.exception())  # asyncio would report a second error
    try:
        if jobs:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
        return [job.result() for job in jobs if job.done()]  # all of them, if none has failed
    finally:
        await cancel_all([job for job in jobs if not job.done()])
