"""What user code can do to the process of a run: end it without a word, replace it by another program, or hold the
interpreter so that nothing else of it runs, not even the handler of a signal. All of it ends in words and an exit code
that is not 0.

    the run's process                                         the sentinel, a small process beside it
      a thread of its own, each second ──────── beat ───────▶  no beat: the interpreter is held
      a signal's handler in C ────── all threads' lines ────▶  and no beat after it: ends the process, names the line
      the end of the run ───────────────────── bye ─────────▶  the end without it: says so

``os._exit`` and ``os.exec...`` are errors of whoever calls them meanwhile, as ``sys.exit`` is. Who waits for whom:
nobody waits for the sentinel but for a moment at the end. Linux only; elsewhere nobody watches.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from whet.processes import sentinel_process
from whet.processes.sentinel_process import ASK, BEAT, BYE, LIMIT

log = logging.getLogger(__name__)

_BEAT_S = 1.0  # seconds between two beats
_CLOSING = 5.0  # seconds that the sentinel has to end
_ENDING = ("_exit", "execv", "execve")  # of os; execl, execvp and the others call these


class Ended(SystemExit):
    """User code called a function that would have ended the process, or replaced it."""

    def __init__(self, call: str) -> None:
        super().__init__(1)
        self.call = call

    def __repr__(self) -> str:
        return self.call

    __str__ = __repr__


@contextmanager
def endings_are_errors() -> Iterator[None]:
    """Have ``os._exit`` and ``os.exec...`` raise ``Ended`` in this process. Copies of it may end as they like."""
    own, real = os.getpid(), {name: getattr(os, name) for name in _ENDING}
    if any(isinstance(function, _Instead) for function in real.values()):
        yield
        return
    for name, function in real.items():
        setattr(os, name, _Instead(name, function, own))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class _Instead:
    """Stands where a function of ``os`` was."""

    def __init__(self, name: str, real: Callable[..., Any], process: int) -> None:
        self.name, self.real, self.process = name, real, process

    def __call__(self, *arguments: Any) -> NoReturn:
        if os.getpid() == self.process:
            call = f"os.{self.name}({', '.join(map(repr, arguments[:2]))})"
            log.warning("code of the run called %s, which would end its process; it is an error there instead", call)
            raise Ended(call)
        self.real(*arguments)
        raise AssertionError("never returns")


_lines = list[int]()  # to the sentinel, where there is one


@contextmanager
def watched(after: str = "", limit: float = LIMIT) -> Iterator[None]:
    """Have a sentinel watch this process. ``after``: what it tells a user to do when the process is gone; ``limit``:
    seconds for which the interpreter may be held."""
    if sys.platform != "linux" or _lines:
        yield
        return
    theirs, ours = os.pipe()
    script = str(Path(sentinel_process.__file__))
    command = [sys.executable, "-I", "-S", script, str(os.getpid()), str(limit), after]
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL)
    except OSError as error:
        log.warning("no process watches this one, because none can be started: %s", error.strerror)
        os.close(ours)
        yield
        return
    finally:
        os.close(theirs)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(ours, ended), name="whet-heart", daemon=True)
    thread.start()
    faulthandler.register(ASK, file=ours, all_threads=True)
    _lines.append(ours)
    try:
        with told_of(signal.SIGINT):
            yield
    finally:
        _lines.clear()
        ended.set()
        thread.join(_CLOSING)
        faulthandler.unregister(ASK)
        with contextlib.suppress(OSError):
            os.write(ours, BYE)
        os.close(ours)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSING)


@contextmanager
def told_of(*signals: signal.Signals) -> Iterator[None]:
    """Tell the sentinel of these signals when they come, before their handlers, which are Python's and so may never
    run. Handlers that are there already are called as before."""
    told = [one for one in signals if _lines and callable(signal.getsignal(one))]
    for one in told:
        faulthandler.register(one, file=_lines[0], all_threads=True, chain=True)
    try:
        yield
    finally:
        for one in told:
            faulthandler.unregister(one)


def _beat(line: int, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not ended.wait(_BEAT_S):
            os.write(line, BEAT)
