"""Closing the parts of a run in the reverse order of their opening; an error in one does not skip the rest."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

log = logging.getLogger(__name__)

abandoned_threads = list[str]()
"""Names of threads that ignored the request to end. The process must not wait for them when it exits."""


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


async def cancel_all(jobs: Sequence[asyncio.Task[object]], seconds: float = 30.0) -> None:
    """Cancel jobs and wait at most ``seconds`` for them, because a job may ignore its cancellation."""
    for job in jobs:
        job.cancel()
    if jobs:
        await asyncio.wait(jobs, timeout=seconds)
