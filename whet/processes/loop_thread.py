"""An event loop on a separate thread, for user code that may block, never end, or try to end the process.

Who waits for whom: a caller of ``run`` may give up at any time: the code is then cancelled and, if it ignores that,
abandoned. Other code on the same thread waits as long as one call blocks; ``blocked_at`` reports where. Abandoned
threads are listed in ``abandoned_threads``.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Generic, TypeVar, TypeVarTuple, cast

from whet.base.closing import abandoned_threads
from whet.base.errors import WhetError
from whet.processes.user_code import brief, check_ran, user_frames

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

COPIED = 71  # exit status of a fork of this process that user code made with os.fork
_LIBRARY = sysconfig.get_path("stdlib")
_CLOSING = 1.0  # seconds that user code has to end when the thread is closed
_LOOPS = weakref.WeakSet[asyncio.AbstractEventLoop]()  # loops that must not continue in a fork of the process


class UserCodeExit(Exception):
    """User code raised an exception that would end more than the call: ``SystemExit``, ``CancelledError`` ..."""


@dataclass(slots=True)
class Outcome(Generic[T]):
    """The outcome of a call. asyncio would pass a ``TimeoutError`` to another thread as a new one, without the lines
    that raised it."""

    value: T | None = None
    error: Exception | None = None

    def result(self) -> T:
        """Return the value or raise the error."""
        if self.error is None:
            return cast(T, self.value)
        try:
            raise self.error
        finally:
            self.error = None  # the error's traceback has this frame, and such a cycle would keep all of its values


class LoopThread:
    """A thread with an event loop, started at the first call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_stray)
        self._helpers = ThreadPoolExecutor(thread_name_prefix=f"{name}-helper")  # of asyncio.to_thread
        self._loop.set_default_executor(self._helpers)
        self._ended = False
        exit_forked_children(self._loop)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def run(self, call: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Return ``await call(*args)``, or ``call(*args)`` if ``call`` is a plain function. Raises the exceptions of
        the call, ``UserCodeExit`` for ones that are not an ``Exception``. A caller that is cancelled does not wait for
        the end of the call."""
        if self._ended:
            raise WhetError(f"{self.name} is closed")
        if not self._thread.ident:
            self._thread.start()
        # With asyncio.run_coroutine_threadsafe, whose futures have locks, this would take twice the time.
        caller, task = asyncio.get_running_loop(), None
        outcome: asyncio.Future[Outcome[T]] = caller.create_future()

        def begin() -> None:
            nonlocal task
            task = self._loop.create_task(_contained(call, *args))
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[Outcome[T]]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                caller.call_soon_threadsafe(answer, task)

        def answer(task: asyncio.Task[Outcome[T]]) -> None:
            if task.cancelled():
                outcome.cancel()
            elif not outcome.done():
                outcome.set_result(task.result())

        def give_up() -> None:
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(begin)
        try:
            return (await outcome).result()
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # this thread's loop is closed
                self._loop.call_soon_threadsafe(give_up)
            raise

    def blocked_at(self) -> str | None:
        """Return the line that the thread is executing, "FILE:LINE in FUNCTION", or None while it waits. Frames of the
        standard library are skipped."""
        innermost = sys._current_frames().get(self._thread.ident or 0)
        if innermost is None or os.path.basename(innermost.f_code.co_filename) == "selectors.py":
            return None
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_filename.startswith((_LIBRARY, "<")):
            frame = frame.f_back
        code = (frame or innermost).f_code
        return f"{code.co_filename}:{(frame or innermost).f_lineno} in {code.co_qualname}"

    async def close(self) -> None:
        """End the running code and the thread; abandon code that does not end."""
        self._ended = True
        self._helpers.shutdown(wait=False, cancel_futures=True)
        if not self._thread.ident:
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._cancel_all)
        until = time.monotonic() + _CLOSING
        while (hanging := self._hanging()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if hanging:
            abandoned_threads.extend(hanging)
            where = self.blocked_at()
            log.warning("user code does not end and is abandoned%s", f": it is at {where}" if where else "")

    def _hanging(self) -> list[str]:
        helpers = [thread.name for thread in threading.enumerate() if thread.name.startswith(f"{self.name}-helper")]
        return helpers + [self.name] * self._thread.is_alive()

    def _cancel_all(self) -> None:
        """Stop the loop once all tasks have ended."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: self._loop.stop())

    def _run(self) -> None:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # of this thread: a second OpenMP team would slow down the compute thread
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException as error:  # an exit in a task that user code started
                log.warning("user code in the background raised %s", format_error(error))
        self._loop.close()


def exit_forked_children(loop: asyncio.AbstractEventLoop) -> None:
    """Have forks of the process (``os.fork`` in user code) exit before this loop continues in them."""
    _LOOPS.add(loop)


def format_error(error: BaseException) -> str:
    """Return an exception and the line that raised it, preferably in user code; for a ``WhetError`` and any other error
    of whet, whose message says what to do, only the message. Never raises, even if methods of the exception do."""
    of_whet = isinstance(error, Exception) and type(error).__module__.startswith("whet.")
    of_whet |= isinstance(error, WhetError)  # a user's class may be one
    try:
        text = str(error) if of_whet else repr(error)
    except BaseException:
        text = f"{type(error).__name__} (its text can't be formatted)"
    frames, text = user_frames(error), brief(text)
    return text if of_whet or not frames else f"{text} at {frames[-1].filename}:{frames[-1].lineno}"


async def _contained(call: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> Outcome[T]:
    try:
        result = call(*args)
        check_ran(result)
        return Outcome(await result if inspect.isawaitable(result) else result)
    except Exception as error:
        return Outcome(error=error)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        exit_ = UserCodeExit(format_error(error))
        exit_.__cause__ = error
        return Outcome(error=exit_)


def _log_stray(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log errors that no caller awaits, from abandoned code or from tasks that user code started."""
    error = context.get("exception")
    text = format_error(error) if isinstance(error, BaseException) else ""
    log.info("user code in the background: %s %s", context.get("message"), text)


def _end_copy() -> None:
    print("a fork of the run, made by user code with os.fork, ends here", file=sys.stderr, flush=True)
    os._exit(COPIED)


def _in_copy() -> None:
    for loop in _LOOPS:
        if not loop.is_closed():
            loop.call_soon(_end_copy)


os.register_at_fork(after_in_child=_in_copy)
