"""Interrupts (Ctrl-C) of a coroutine that runs in the main thread.

``asyncio.run`` cancels the coroutine at the first interrupt, too, but raises every later one wherever the process is at
that moment: in the middle of closing what the coroutine had opened, or in a destructor, which drops it with a message.
Impatient people press more than twice.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 2.0  # seconds in which the event loop should have handled an interrupt


class _Interrupts:
    """A signal handler. Each interrupt cancels the task; it is raised only if the task has ended, or if the event loop
    is blocked, and ``_PATIENCE`` is over since the interrupt before."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.count = 0
        self._handled = 0
        self._acted = float("-inf")  # the time of the last cancellation or exception

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now, waiting = time.monotonic(), self.count > self._handled
        self.count += 1
        if self.task is not None and not self.task.done() and not waiting:
            self._acted = now
            self.task.get_loop().call_soon_threadsafe(self._cancel)
        elif now - self._acted > _PATIENCE:
            self._acted = now
            raise KeyboardInterrupt

    def _cancel(self) -> None:
        self._handled = self.count
        assert self.task is not None
        self.task.cancel()

    async def watch(self, main: Coroutine[object, object, T]) -> T:
        self.task = asyncio.current_task()
        # An interrupt that is raised inside of a task would also be logged as an error of that task.
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: None if self.count > 1 else loop.default_exception_handler(context)
        )
        return await main


@contextmanager
def interruptible() -> Iterator[_Interrupts]:
    """Handle interrupts inside the block, if this is the main thread and nothing else handles or ignores them. Raises
    ``KeyboardInterrupt`` where an interrupt has cancelled the task."""
    interrupts = _Interrupts()
    main_thread = threading.current_thread() is threading.main_thread()
    ours = main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    except asyncio.CancelledError:
        if interrupts.count:
            raise KeyboardInterrupt from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
