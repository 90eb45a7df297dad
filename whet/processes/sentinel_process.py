"""The process that watches another one: ``sentinel.py`` says for what. It imports nothing but Python's own library.

Who waits for whom: it waits for the beats of its owner, and ends with it, however that ends. A second counts only when
it passed without a beat while the owner was not stopped (Ctrl-Z, a debugger): so neither a pause nor a machine that
slept is taken for an interpreter that is held.
"""

import contextlib
import os
import re
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence

BEAT, BYE = b"\0", b"\1"
ASK = signal.SIGRTMAX - 7 if sys.platform == "linux" else 0
"""The signal at which the owner tells the lines of all its threads."""

LIMIT = 120.0  # seconds for which the interpreter may be held
_WARNING = 10.0  # seconds after which a user is told where, and for which a signal may wait for its handler
_TELLING, _PAUSE = 2.0, 0.2  # seconds for the lines to come, and between two parts of them

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAITS = ("selectors.py", "threading.py", "concurrent/futures/thread.py", "sentinel.py")
_OTHERS = (sysconfig.get_path("stdlib"), "<", os.path.dirname(os.path.dirname(__file__)))

_Frame = tuple[str, str, str]  # file, line, function


def held_at(dump: str) -> str:
    """Return where the code is that holds the interpreter, "FILE:LINE in FUNCTION", in what ``faulthandler`` writes of
    all threads: of those that don't wait for something, one with code of a user, or of an environment, comes first."""
    stacks = [_FRAME.findall(part) for part in re.split(r"\n\s*\n|(?=Thread 0x|Current thread 0x)", dump)]
    busy = [stack for stack in stacks if stack and not stack[0][0].endswith(_WAITS)]
    if not busy:
        return "a place that can't be told"
    file, line, function = _own(min(busy, key=_rank))
    return f"{file}:{line} in {function}"


def _rank(stack: Sequence[_Frame]) -> int:
    if any(_is_users(frame) for frame in stack):
        return 0
    return 1 if any(frame[0].endswith("loop_thread.py") for frame in stack) else 2


def _own(stack: Sequence[_Frame]) -> _Frame:
    users = [frame for frame in stack if _is_users(frame)]
    return next(iter(users + [frame for frame in stack if not frame[0].startswith(_OTHERS[:2])]), stack[0])


def _is_users(frame: _Frame) -> bool:
    return not frame[0].startswith(_OTHERS) and "site-packages" not in frame[0]


class Watch:
    """One owner."""

    def __init__(self, owner: int, limit: float, after: str) -> None:
        self.owner, self.limit, self.after = owner, limit, f" {after}" if after else ""
        self.beaten()

    def beaten(self) -> None:
        """The owner is well."""
        self.silent = 0.0  # seconds without a beat
        self.dump = b""  # the lines of its threads since
        self.signalled = self.warned = False  # since

    def run(self) -> None:
        """Return once the owner said good-bye, or is gone."""
        while True:
            if not select.select([0], [], [], 1.0)[0]:
                if os.getppid() != self.owner:
                    return self.gone()
                self.silent += not _stopped(self.owner)
                if self.overdue():
                    return None
                continue
            data = os.read(0, 1 << 16)
            if BYE in data:
                return None
            if not data:
                return self.gone()
            if BEAT in data:
                self.beaten()
            if told := data.rpartition(BEAT)[2]:  # unasked: by the handler of a signal
                self.dump, self.signalled = self.dump + told, True

    def overdue(self) -> bool:
        """Warn where the interpreter is held for long; end the owner where it is for too long, or deaf to a signal."""
        deaf = self.signalled and self.silent >= _WARNING
        if not deaf and self.silent < self.limit:
            if self.silent >= _WARNING and not self.warned:
                self.warned = True
                say(
                    f"warning: the interpreter has been held for {self.silent:.0f} s at {self.place()}; nothing else "
                    f"of the process can run. After {self.limit:.0f} s, or at a signal (Ctrl-C), it is ended"
                )
            return False
        why = "a signal came, and the interpreter" if deaf else "the interpreter"
        say(
            f"error: {why} has been held for {self.silent:.0f} s at {self.place()}: nothing else of the process could "
            f"run, so it is ended. Bound what is computed there, or run it in another process.{self.after}"
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.owner, signal.SIGKILL)
        return True

    def place(self) -> str:
        """Where the interpreter is held. Asks the owner for the lines of its threads."""
        if not self.dump:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.owner, ASK)
            wait = _TELLING
            while select.select([0], [], [], wait)[0] and (data := os.read(0, 1 << 16)):
                self.dump, wait = self.dump + data, _PAUSE
        return held_at(self.dump.decode(errors="replace"))

    def gone(self) -> None:
        """Say that the owner ended without a word, or does not speak any more though it is there."""
        until = time.monotonic() + _TELLING
        while os.getppid() == self.owner and time.monotonic() < until:
            time.sleep(0.02)
        if os.getppid() == self.owner:
            say(
                f"error: process {self.owner} of the run was replaced by another program, or its files were closed; "
                f"it is ended.{self.after}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.owner, signal.SIGKILL)
            return
        say(
            f"error: process {self.owner} of the run ended without a word: it was killed (as the system does where "
            f"memory runs out), it crashed, or code of the run ended it.{self.after}"
        )


def _stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def say(text: str) -> None:
    """Print one line, wherever errors go."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(one, signal.SIG_IGN)  # sent to all processes of a terminal or job: the owner decides
    Watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).run()
