"""A small program that starts another one and adopts all orphans below it, so that no process of it remains.

    the run ── keeper ── the program ── its processes, whatever their sessions, variables and folders

    python -I -S keeper.py OWNER FOLDER NAME=VALUE ... -- WORDS ...

It kills every process below itself when the program has ended, at SIGTERM, and when its owner, the process that started
it, has ended in any way; then it ends as the program did. Imports only the standard library. Linux, where a process
can adopt (prctl(2), ``PR_SET_CHILD_SUBREAPER``); elsewhere a program is started without it.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

_ADOPT = 36  # an option of prctl
_LOOK_S = 0.5  # seconds between two looks at the owner
_ROUNDS, _PAUSE = 1000, 0.01  # of killing; the pauses are seconds
_NOT_STARTED = 127


def under_keeper(words: Sequence[str], folder: str, **variables: str) -> list[str]:
    """Return the command that starts ``words`` below a keeper of this process, in ``folder`` and with ``variables``
    besides the keeper's own, which therefore isn't found by them."""
    given = [f"{name}={value}" for name, value in variables.items()]
    if sys.platform != "linux":
        return ["sh", "-c", 'cd "$1" && shift && exec env "$@"', "sh", folder, *given, *words]
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), folder, *given, "--", *words]


def _keep(owner: int, folder: str, variables: Sequence[str], words: Sequence[str]) -> int:
    """Start the program and wait. Return its exit status, or minus a signal."""
    ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)
    if not (program := os.fork()):
        _start(folder, variables, words)
    while os.getppid() == owner:
        for process, status in _ended():
            if process == program:
                return status
        if select.select([reader], [], [], _LOOK_S)[0] and signal.SIGTERM in os.read(reader, 1 << 16):
            break
    return -signal.SIGTERM


def _start(folder: str, variables: Sequence[str], words: Sequence[str]) -> None:
    """Replace this process by the program."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder)
        given = (variable.partition("=") for variable in variables)
        os.execvpe(words[0], [*words], {**os.environ, **{name: value for name, _, value in given}})
    except OSError as error:
        os.write(2, f"{words[0]} can't be started: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(_NOT_STARTED)


def _ended() -> Iterator[tuple[int, int]]:
    """Yield the children that have ended, with their exit statuses."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _end_all() -> None:
    """Kill all processes below this one, which adopts the orphans, until there is none."""
    for _ in range(_ROUNDS):
        for process in _below(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_PAUSE)
        except ChildProcessError:
            return


def _below(process: int) -> list[int]:
    """Return all processes below one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # else it has ended
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    family = [process]
    for member in family:
        family += children.get(member, [])
    return family[1:]


def _main(owner: str, folder: str, *rest: str) -> None:
    at = rest.index("--")
    status = _keep(int(owner), folder, rest[:at], rest[at + 1 :])
    _end_all()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # this program didn't crash
        with suppress(OSError):  # SIGKILL has no other effect
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
