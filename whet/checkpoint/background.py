"""Saving a checkpoint in the background during training: at most one save at a time, and its failure is never lost.

Who waits for what: the run waits until the copy is taken; the next save and the end of the run wait for a save in
progress. The learner's part of a save ends by ``learner.deadline``; hashing and publishing take as long as the disk."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds for a save in progress when the run ends for another reason


class BackgroundSave:
    """The save in progress of a run, if any."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._step = 0

    async def begin(self, step: int, save: Callable[[asyncio.Event], Awaitable[object]]) -> None:
        """Start ``save(copied)`` and return when it sets ``copied``; then the weights may change. Raises the error of
        ``save`` before that, or of the previous save."""
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
        """Raise the error of the save, if it has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def finish(self) -> None:
        """Wait until the checkpoint is published. Raises the error of the save."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self.check()

    async def close(self) -> None:
        """End the save of a run that ends, perhaps by an error; a save that is nearly done gets a short time."""
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=_CLOSING)
        if not self._task.done():
            self._task.cancel()  # ends the learner's writing, but not the publishing of a checkpoint
            await asyncio.wait({self._task})
        task, self._task = self._task, None
        if task.cancelled():
            log.warning(
                "the run ended while the checkpoint of step %d was being written; that checkpoint may be missing",
                self._step,
            )
        else:
            task.result()
