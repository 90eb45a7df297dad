"""Handling of SIGTERM and SIGHUP, which clusters send before they take a machine away: the run finishes its step,
saves, and ends. A second signal ends it at once."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whet.errors import WhetError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(WhetError):
    """A signal ended the run, after it was saved."""

    label = "stopped"

    def __init__(self, by: signal.Signals, text: str) -> None:
        super().__init__(f"{by.name} came, and {text}")
        self.exit_code = 128 + by


@dataclass(slots=True)
class StopRequest:
    """The signal that asked the run to end, if one came. The run looks at it between steps."""

    by: signal.Signals | None = None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn the signals into a request, inside, where the event loop runs in the main thread. A signal that is ignored
    (``nohup``) stays ignored."""
    request, loop = StopRequest(), asyncio.get_running_loop()
    before = {one: signal.getsignal(one) for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}
    if threading.current_thread() is not threading.main_thread():
        before = {}

    def asked(by: signal.Signals) -> None:
        request.by = by
        for one in before:
            loop.remove_signal_handler(one)
        log.warning("%s came: the run saves after this step and ends; another one ends it at once", by.name)

    for one in before:
        loop.add_signal_handler(one, asked, one)
    try:
        yield request
    finally:
        for one, handler in before.items():
            loop.remove_signal_handler(one)
            signal.signal(one, handler)
