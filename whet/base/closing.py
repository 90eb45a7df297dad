"""Closing the parts of a run: all of them, in the reverse order in which they were opened, even if one fails."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

left_behind = list[str]()
"""Names of threads that did not end when asked to. The end of the process must not wait for them."""


class Closing(AsyncExitStack):
    """An exit stack that raises the first error. Later errors, from closing parts because of it, are logged."""

    def closes(self, name: str, close: Callable[[], Awaitable[None] | None]) -> None:
        """Call, and await, ``close()`` at the end. ``name`` is for the log."""

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


async def cancelled(jobs: Sequence[asyncio.Task[Any]], seconds: float = 30.0) -> None:
    """Cancel jobs and wait for their ends; one that ignores it must not keep a run from ending."""
    for job in jobs:
        job.cancel()
    if jobs:
        await asyncio.wait(jobs, timeout=seconds)
