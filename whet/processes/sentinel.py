"""Protects the process of a run from user code that ends it silently, replaces it by another program, or holds the
interpreter so that nothing else runs, not even signal handlers. Each case ends with a message and a nonzero exit code.

    the run's process                                         the sentinel, a small second process
      a separate thread, every second ───────── beat ───────▶  no beat: the interpreter is held
      a signal handler in C ──────── this thread's lines ───▶  then no beat: asks for the lines of all threads, names
                                                               the one that holds the interpreter, ends the process
      the end of the run ───────────────────── bye ─────────▶  end without it: reports it

``os._exit`` and ``os.exec...`` are errors of their caller, like ``sys.exit``. Who waits for whom: the run waits for the
sentinel only for a moment at the end. Linux only; on other systems there is no sentinel.
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
from typing import NoReturn

from whet.processes import sentinel_process
from whet.processes.sentinel_process import ASK, BEAT, BYE, LIMIT

log = logging.getLogger(__name__)

_BEAT_S = 1.0  # seconds between two beats
_CLOSING = 5.0  # seconds to wait for the end of the sentinel
_ENDING = ("_exit", "execv", "execve")  # of os; execl, execvp etc. call these


class Ended(SystemExit):
    """User code called a function that would end or replace the process."""

    def __init__(self, call: str) -> None:
        super().__init__(1)
        self.call = call

    def __repr__(self) -> str:
        return self.call

    __str__ = __repr__


@contextmanager
def endings_are_errors() -> Iterator[None]:
    """Have ``os._exit`` and ``os.exec...`` raise ``Ended`` in this process, but not in its forks."""
    process, real = os.getpid(), {name: getattr(os, name) for name in _ENDING}
    if any(isinstance(function, _Replacement) for function in real.values()):
        yield
        return
    for name, function in real.items():
        setattr(os, name, _Replacement(name, function, process))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class _Replacement:
    """Replaces a function of ``os``."""

    def __init__(self, name: str, real: Callable[..., object], process: int) -> None:
        self.name, self.real, self.process = name, real, process

    def __call__(self, *arguments: object) -> NoReturn:
        if os.getpid() == self.process:
            call = f"os.{self.name}({', '.join(map(repr, arguments[:2]))})"
            log.warning("code of the run called %s, which would end the process; it raises an error instead", call)
            raise Ended(call)
        self.real(*arguments)
        raise AssertionError("never returns")


_lines = list[int]()  # the pipe to the sentinel, if there is one


@contextmanager
def watched(after: str = "", limit: float = LIMIT) -> Iterator[None]:
    """Have a sentinel watch this process. ``after``: advice that it prints if the process ends unexpectedly; ``limit``:
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
        log.warning("the sentinel process can't be started, so this process is not watched: %s", error.strerror)
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
        with report_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
def report_signals(*signals: signal.Signals) -> Iterator[None]:
    """Report these signals to the sentinel when they arrive, before their Python handlers, which may never run.
    Existing handlers are called as before. Only the lines of the receiving thread are written: reading the lines of
    threads that run at this moment can crash the process."""
    reported = [number for number in signals if _lines and callable(signal.getsignal(number))]
    for number in reported:
        faulthandler.unregister(number)  # a registration is lost without a word where its handler was replaced since
        faulthandler.register(number, file=_lines[0], all_threads=False, chain=True)
    try:
        yield
    finally:
        for number in reported:
            faulthandler.unregister(number)


def _beat(line: int, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not ended.wait(_BEAT_S):
            os.write(line, BEAT)
