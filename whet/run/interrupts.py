"""Work that blocks its caller, which may be the cell of a notebook: such a cell runs in the main thread, inside of an
event loop, and an interrupt must end the work within a step.

Who waits for whom: the caller waits for a thread, and an interrupt, which only the main thread gets, is passed on to
the work. A second interrupt is raised at once.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from whet.run.signals import Stopped, StopRequest

T = TypeVar("T")


def without_loop(work: Callable[[StopRequest], T]) -> T:
    """Return the result of work that starts an event loop: in this thread or, inside of a running loop, on another one.
    There an interrupt is a request to the work, which ends a run after its step; a second one ends it at once. Raises
    ``KeyboardInterrupt`` after that."""
    stop = StopRequest()
    if not _in_loop():
        return work(stop)
    thread = ThreadPoolExecutor(1, thread_name_prefix="whet-run")
    running: Future[T] | None = None
    interrupted = False
    try:
        with _raised():
            while True:
                try:
                    if running is None:
                        with _later():  # a thread that starts, but is not known to Python yet, would never be ended
                            running = thread.submit(work, stop)
                    return _result(running)
                except KeyboardInterrupt:
                    if running is None:
                        raise
                    interrupted = True
                    if stop.interrupt():
                        print("interrupted: the run saves after this step and ends; interrupt again to end it at once")
    except (Stopped, asyncio.CancelledError) as error:
        if not interrupted:
            raise
        raise KeyboardInterrupt(str(error)) from None
    finally:
        thread.shutdown(wait=False)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _raised() -> Iterator[None]:
    """Raise interrupts in the block. The handler of ``asyncio.run`` would only cancel its task at the next await."""
    handler = signal.getsignal(signal.SIGINT)
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, partial) else None
    if threading.current_thread() is not threading.main_thread() or not isinstance(owner, asyncio.Runner):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _later() -> Iterator[None]:
    """Handle interrupts of the block after it."""
    if threading.current_thread() is not threading.main_thread():  # which gets none
        yield
        return
    kept = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: kept.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if kept:
            signal.raise_signal(signal.SIGINT)


def _result(future: Future[T]) -> T:
    """Return the result of a future. The wait is renewed each half second, because an interrupt doesn't end it if the
    system gave the signal to another thread, or just before the wait."""
    while not wait([future], 0.5).done:
        pass
    return future.result()


def wait_for(work: Coroutine[object, object, T], loop: asyncio.AbstractEventLoop) -> T:
    """Return the result of a coroutine that runs on the loop of another thread. An interrupt cancels it, and is raised
    once the coroutine has ended."""
    started: Future[asyncio.Task[Any]] = Future()

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result(task)
        return await work

    future: Future[T] | None = None
    try:
        with _raised():
            with _later():  # a coroutine that runs, but is not known here yet, would never be cancelled
                future = asyncio.run_coroutine_threadsafe(run(), loop)
            return _result(future)
    except KeyboardInterrupt:
        if future is not None:
            loop.call_soon_threadsafe(started.result().cancel)
            wait([future])  # a second interrupt does not wait
        raise
