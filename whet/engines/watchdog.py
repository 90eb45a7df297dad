"""The deadline of an engine is for its progress, not for one request, which may be long or wait behind others."""

import asyncio
import time
from typing import Any

from whet.base.errors import DeadlineError


class Watchdog:
    """Ends waits for an engine that makes no progress for ``deadline`` seconds and is not ``paused``."""

    def __init__(self, deadline: float) -> None:
        self.paused = False
        self._deadline = deadline
        self._progress = time.monotonic()  # time of the last one

    def reset(self) -> None:
        """Note that the engine makes progress; called from any thread."""
        self._progress = time.monotonic()

    async def wait(self, work: "asyncio.Future[Any]", problem: str, cause: str = "") -> None:
        """Return when ``work`` is done. Raises ``DeadlineError`` with the ``problem`` of an engine without progress."""
        while not work.done():
            left = self._progress + self._deadline - time.monotonic()
            await asyncio.wait({work}, timeout=self._deadline if self.paused or left <= 0 else left)
            silence = time.monotonic() - self._progress
            if silence >= self._deadline and not (self.paused or work.done()):
                raise DeadlineError(
                    f"{problem} for {silence:.0f} s (generator.deadline is {self._deadline:g} s){cause}"
                )
