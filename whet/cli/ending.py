"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that it closes what it has opened, leaves no half-written folder
and says why it ended. Commands that save first (a run, a pipeline) handle these signals themselves. Process 1 of a
container has no other way to hear of SIGTERM: the kernel ignores it there if no handler exists."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """Raised by a signal in place of an interrupt."""


@contextmanager
def signals_interrupt() -> Iterator[list[signal.Signals]]:
    """Inside, call the handler of interrupts when one of the signals comes; yield a list of the signals that came.
    Ignored ones (``nohup``) stay ignored."""
    came, owner = list[signal.Signals](), os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        came.append(signal.Signals(number))
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler or not callable(handler):  # ignored in the background of a script
            raise SignalInterrupt
        handler(number, frame)

    main_thread = threading.current_thread() is threading.main_thread()
    ours = [number for number in _SIGNALS if main_thread and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
