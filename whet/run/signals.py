"""Handling of SIGTERM and SIGHUP, which clusters send before they take a machine away, and of the end of a Slurm job's
time: the run gives up an evaluation that it is in, finishes its step, saves, and ends. A second signal, or one before
the first step, ends it at once."""

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from whet.base.errors import WhetError
from whet.processes.sentinel import report_signals

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class Stopped(WhetError):
    """A signal or the end of its time ended the run, after it was saved."""

    label = "stopped"

    def __init__(self, by: signal.Signals, why: str, text: str) -> None:
        super().__init__(f"{why}, and {text}")
        self.exit_code = 128 + by


@dataclass(slots=True)
class StopRequest:
    """The signal that asked the run to end, if any. The run checks it between steps."""

    by: signal.Signals | None = None
    why: str = ""
    begun: bool = False  # there are steps to save
    at_once: bool = False  # it is not worth a save
    cancel: Callable[[], object] = lambda: None  # ends the run at once; may be called from any thread
    _optional: asyncio.Task[Any] | None = None  # work in progress that is given up when the run is asked to end

    def ask(self, by: signal.Signals, why: str) -> None:
        """Ask the run to end. May be called from any thread."""
        self.by, self.why = by, why
        if (task := self._optional) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def unless_asked(self, work: Coroutine[object, object, T]) -> T | None:
        """Return the result of ``work``; None, and give it up, if the run is asked to end before."""
        self._optional = asyncio.create_task(work)
        try:
            if self.by is not None:
                self._optional.cancel()
            return await self._optional
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.by is None or (task is not None and task.cancelling()):
                raise
            return None
        finally:
            self._optional = None

    def cancels_this_task(self) -> None:
        """Have ``cancel`` cancel the calling task."""
        if (task := asyncio.current_task()) is not None:
            self.cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self.at_once:
            self.cancel()

    def interrupt(self) -> bool:
        """End the run after its step. Return False if it ends at once: on a second request or before the first step."""
        if self.by is None and self.begun:
            self.ask(signal.SIGINT, "interrupted")
            return True
        self.at_once = True  # for a run that is about to begin
        self.cancel()
        return False


def end_of_job() -> float | None:
    """Return when Slurm will end the job that this process is part of, in seconds since 1970; None without a job or
    without an end."""
    announced, job = os.environ.get("SLURM_JOB_END_TIME", ""), os.environ.get("SLURM_JOB_ID")
    if announced.isdecimal():
        return float(announced)
    if job is None:
        return None
    try:
        shown = subprocess.run(
            ["scontrol", "show", "job", "-o", job], capture_output=True, text=True, timeout=20
        ).stdout
        fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        return datetime.fromisoformat(fields.get("EndTime", "")).timestamp()
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


@contextmanager
def stop_signals(before: float | None = None, request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Inside, turn the signals into a request, if the event loop runs in the main thread. A signal that is ignored
    (``nohup``) stays ignored. The request also comes when ``before`` seconds are left of a Slurm job."""
    request, loop = request or StopRequest(), asyncio.get_running_loop()
    request.cancels_this_task()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}

    def restore(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        signal.signal(number, handlers[number])

    def asked(by: signal.Signals, why: str) -> None:
        reports.close()
        for number in handlers:
            loop.remove_signal_handler(number)  # which leaves the system's: it ends even a process that hangs
        log.warning("%s: the run saves after this step and ends; the next signal ends it at once", why)
        request.ask(by, why)

    def came(number: signal.Signals) -> None:
        if request.begun:
            asked(number, f"{number.name} came")
            return
        log.warning("%s came: the run ends at once, because it has no new step to save", number.name)
        reports.close()
        restore(number)  # the one of a command, which closes what is open
        os.kill(os.getpid(), number)

    for number in handlers:
        loop.add_signal_handler(number, came, number)
    reports = ExitStack()
    reports.enter_context(report_signals(*handlers))
    timer, end = None, None if before is None else end_of_job()
    if before is not None and end is not None:
        why = f"the job's time is over in less than {before:.0f} s"
        timer = loop.call_later(max(0.0, end - before - time.time()), asked, signal.SIGTERM, why)
    elif before is not None:
        log.warning("checkpoints.before refers to the end of a Slurm job, and this process is not part of one")
    try:
        yield request
    finally:
        if timer is not None:
            timer.cancel()
        reports.close()  # before the handlers are removed, because it puts them back
        for number in handlers:
            restore(number)
