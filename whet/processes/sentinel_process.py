"""The sentinel process, see ``sentinel.py``, and the programs that it ends with a run: they are recognised by a
variable of their environment, which every child inherits. Imports only the standard library.

Who waits for whom: it waits for the beats of its owner, and ends with it. A second without a beat counts only if the
owner was not stopped (Ctrl-Z, a debugger), and without the time for which a thread of the owner waited for a core, so
neither a pause, nor a machine that slept or is busy, is mistaken for a held interpreter.
"""

import contextlib
import os
import re
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

BEAT, BYE = b"\0", b"\1"
ASK = signal.SIGRTMAX - 7 if sys.platform == "linux" else 0
"""The signal on which the owner reports the lines of all its threads."""

LIMIT = 120.0  # seconds for which the interpreter may be held
_WARNING = 10.0  # seconds until a warning with the line, and for which a signal may wait for its handler
_REPORT, _PAUSE = 2.0, 0.2  # seconds to wait for the report of lines, and between its parts

OWNER = "WHET_OWNER"  # the variable with the process id of the run, by which a program is killed when its run is lost

_ROUNDS = 100  # a process may fork while the others are killed

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAITS = ("selectors.py", "threading.py", "concurrent/futures/thread.py", "sentinel.py")
_OTHERS = (sysconfig.get_path("stdlib"), "<", os.path.dirname(os.path.dirname(__file__)))

_Frame = tuple[str, str, str]  # file, line, function


def held_at(dump: str) -> str:
    """Return the line that holds the interpreter, "FILE:LINE in FUNCTION", from ``faulthandler``'s report of all
    threads: of the threads that are not waiting, preferably one in user code or in an environment."""
    stacks = [_FRAME.findall(part) for part in re.split(r"\n\s*\n|(?=Thread 0x|Current thread 0x)", dump)]
    busy = [stack for stack in stacks if stack and not stack[0][0].endswith(_WAITS)]
    if not busy:
        return "an unknown place"
    file, line, function = _users_frame(min(busy, key=_rank))
    return f"{file}:{line} in {function}"


def _rank(stack: Sequence[_Frame]) -> int:
    if any(_is_users(frame) for frame in stack):
        return 0
    return 1 if any(frame[0].endswith("loop_thread.py") for frame in stack) else 2


def _users_frame(stack: Sequence[_Frame]) -> _Frame:
    users = [frame for frame in stack if _is_users(frame)]
    return next(iter(users + [frame for frame in stack if not frame[0].startswith(_OTHERS[:2])]), stack[0])


def _is_users(frame: _Frame) -> bool:
    return not frame[0].startswith(_OTHERS) and "site-packages" not in frame[0]


class Watch:
    """The watch over one owner."""

    def __init__(self, owner: int, limit: float, after: str) -> None:
        self.owner, self.limit, self.after = owner, limit, f" {after}" if after else ""
        self.beaten()

    def beaten(self) -> None:
        """Record a beat."""
        self.silent = 0.0  # seconds since the beat for which the owner could have computed
        self.waits = core_waits(self.owner)
        self.signalled = self.warned = False  # since the beat

    def run(self) -> None:
        """Return after the owner's goodbye, or its end."""
        while True:
            if not select.select([0], [], [], 1.0)[0]:
                if os.getppid() != self.owner:
                    return self.report_end()
                self.silent += self.computable()
                if self.overdue():
                    return None
                continue
            data = os.read(0, 1 << 16)
            if BYE in data:
                return None
            if not data:
                return self.report_end()
            if BEAT in data:
                self.beaten()
            if data.rpartition(BEAT)[2]:  # lines that were not requested, so from the handler of a signal
                self.signalled = True

    def computable(self) -> float:
        """Return for how much of the last second the owner could have computed."""
        before, self.waits = self.waits, core_waits(self.owner)
        waited = max((wait - before[thread] for thread, wait in self.waits.items() if thread in before), default=0.0)
        return 0.0 if _stopped(self.owner) else max(0.0, 1.0 - waited)

    def overdue(self) -> bool:
        """Warn if the interpreter is held for long; kill the owner if it is held for too long or ignores a signal."""
        deaf = self.signalled and self.silent >= _WARNING
        if not deaf and self.silent < self.limit:
            if self.silent >= _WARNING and not self.warned:
                self.warned = True
                say(
                    f"warning: the interpreter has been held for {int(self.silent)} s at {self.place()}; nothing else "
                    f"of the process can run. After {self.limit:.0f} s, or at a signal (Ctrl-C), it is ended"
                )
            return False
        why = "a signal arrived, and the interpreter" if deaf else "the interpreter"
        say(
            f"error: {why} has been held for {int(self.silent)} s at {self.place()}: nothing else of the process could "
            f"run, so it is ended. Limit the computation there, or run it in another process.{self.after}"
        )
        self.end_owner()
        return True

    def end_owner(self) -> None:
        """Kill the owner and the programs that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.owner, signal.SIGKILL)
        end_programs(self.owner)

    def place(self) -> str:
        """Return where the interpreter is held, by requesting the lines of the owner's threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.owner, ASK)
        dump, wait = b"", _REPORT
        while select.select([0], [], [], wait)[0] and (data := os.read(0, 1 << 16)):
            dump, wait = dump + data, _PAUSE
        return held_at(dump.decode(errors="replace"))

    def report_end(self) -> None:
        """Report that the owner ended silently, or still exists but has closed the pipe."""
        until = time.monotonic() + _REPORT
        while os.getppid() == self.owner and time.monotonic() < until:
            time.sleep(0.02)
        if os.getppid() == self.owner:
            say(
                f"error: process {self.owner} of the run was replaced by another program, or its files were closed; "
                f"it is ended.{self.after}"
            )
            return self.end_owner()
        end_programs(self.owner)
        return say(
            f"error: process {self.owner} of the run ended without a message: it was killed (by the system, if memory "
            f"ran out), it crashed, or code of the run ended it.{self.after}"
        )


def end_programs(owner: int) -> None:
    """Kill the programs of episodes, which have their own sessions and may block for long."""
    kill_marked(OWNER, str(owner))


def kill_marked(name: str, value: str, place: Path | None = None) -> None:
    """Kill all processes whose environment has the variable, also a process that has left its process group or session;
    and processes that work in the folder ``place``, whatever their environment. Linux; elsewhere nothing is found."""
    for _ in range(_ROUNDS):
        processes = list(_marked(f"{name}={value}".encode(), place))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return
        time.sleep(0.01)


def _marked(variable: bytes, place: Path | None) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            marked = variable in (folder / "environ").read_bytes().split(b"\0")
            if marked or (place is not None and (folder / "cwd").readlink().is_relative_to(place)):
                yield int(folder.name)


def core_waits(process: int) -> dict[str, float]:
    """Return how many seconds each thread of a process was ready to compute and had no core, as Linux counts them."""
    waits = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
                waits[thread] = int(file.read().split()[1]) / 1e9
    return waits


def _stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def say(text: str) -> None:
    """Print one line to standard error."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a terminal or job: the owner decides
    Watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).run()
