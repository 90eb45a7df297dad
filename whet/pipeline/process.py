"""A stage in a child process, so that its memory ends with it and its end, whatever the reason, is seen here.

Who waits for whom: the pipeline waits for the stage. Ctrl-C, SIGTERM and SIGHUP come to the pipeline alone, because the
stage is in another session, and are passed on: a run finishes its step, saves and ends, and a second signal ends it
at once. The kernel ends the stage when the pipeline ends for any reason (Linux).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from whet.base.errors import WhetError
from whet.base.files import replacing
from whet.pipeline.commands import Command

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START = (
    "import runpy; from whet.processes.child import kill_on_parent_exit; kill_on_parent_exit({owner}); "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


class StageEnded(WhetError):
    """A signal ended the pipeline, after it was passed on to its stage."""

    label = "stopped"

    def __init__(self, by: int, text: str) -> None:
        super().__init__(f"{signal.Signals(by).name} came{text}")
        self.exit_code = 128 + by


def run_command(command: Command, *, quiet: bool = False) -> None:
    """Run a command to its end. ``quiet``: its standard output is written to standard error. Raises ``WhetError`` if it
    fails, ``StageEnded`` or ``KeyboardInterrupt`` after a signal."""
    code = _START.format(owner=os.getpid(), module=command.module)
    words = [sys.executable, "-c", code, *command.words]
    with ExitStack() as stack:
        output = sys.stderr.fileno() if quiet else None
        if command.output is not None:
            output = stack.enter_context(stack.enter_context(replacing(command.output)).open("wb")).fileno()
        sys.stdout.flush()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)
        with _passed_on(process) as received:
            status = process.wait()
        if received:
            if received[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise StageEnded(received[0], "")
        if status:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit code {status}"
            hint = " (perhaps for lack of memory)" if status == -signal.SIGKILL else ""
            raise WhetError(f"{command} {how}{hint}")


@contextmanager
def _passed_on(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Inside, pass signals on to the process; yield a list of them. Ignored ones (``nohup``) stay ignored."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    changed = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, pass_on)
    try:
        yield received
    finally:
        for number in changed:
            signal.signal(number, before[number])
