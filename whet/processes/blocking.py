"""One blocking call on a thread of its own. A caller that gives up leaves the thread behind; it keeps neither the
process from ending nor other calls from running."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from whet.processes.loop_thread import Escape, described

T = TypeVar("T")


async def on_own_thread(call: Callable[[], T], name: str) -> T:
    """Return ``call()``. Raises what it raises, ``Escape`` for what is no ``Exception``."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that is cancelled can't cancel the call

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(Escape(described(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
