"""A checkpoint that is written while training goes on: at most one at a time, and its failure is never lost.

Who waits for what: the run waits until the copy is taken; the next save and the end of the run wait for the one under
way. The learner's part of it ends by ``learner.deadline``; hashing and publishing end when the disk has it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds that a save still has when the run ends because of something else


class Behind:
    """The save under way, if there is one."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._step = 0

    async def begin(self, step: int, save: Callable[[asyncio.Event], Awaitable[object]]) -> None:
        """Start ``save(copied)`` and return when it sets ``copied``: what it saves may change from then on. Raises what
        ``save`` raised before that, and what the one before it raised."""
        await self.finish()
        copied = asyncio.Event()
        self._step, self._task = step, asyncio.ensure_future(save(copied))
        waiting = asyncio.ensure_future(copied.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not copied.is_set():
            await self.finish()

    def check(self) -> None:
        """Raise if the save has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def finish(self) -> None:
        """Return when the checkpoint is published. Raises what went wrong."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self.check()

    async def close(self) -> None:
        """The run ends, perhaps because something has failed: a save that is nearly done is worth a short wait."""
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=_CLOSING)
        if not self._task.done():
            self._task.cancel()  # which ends what the learner writes, but not a publishing that has begun
            await asyncio.wait({self._task})
        task, self._task = self._task, None
        if task.cancelled():
            log.warning(
                "the run ended while the checkpoint of step %d was being written; it may be missing", self._step
            )
        else:
            task.result()
