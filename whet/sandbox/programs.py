"""Programs of strangers, run in copies of a warm worker: inside the namespaces that it entered, each within limits of
its own, and nothing of it left when the next one starts.

    worker, process 1 of its world
      ├── copy: the program ◀── calls, values ──▶ copy: its tests, where it has any
      │     source, stdin, stdout, stderr: files in memory, made and read by the owner
      └── /tmp, emptied by another copy after each run

A program can read all the memory of its process, so also what the worker had in its own when it was copied. That is
why the worker learns nothing: sources, inputs, tests, outputs and verdicts are files in memory that it hands on and
never reads. Who waits for whom: the worker waits for the tests, or else for the program, until the deadline, and kills
both.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

from whet.base.errors import WhetError
from whet.sandbox.confinement import AWAY, Confinement, limit
from whet.sandbox.namespaces import enter, needed_by_python
from whet.sandbox.remote_calls import answer_calls, load_program, run_tests

_WARM = ("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "io")
_WARMER = ("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing")


class Status(TypedDict):
    """How a program ended; where it has tests, how they did."""

    status: int  # the exit status, or minus the signal that killed it
    late: bool  # it took more time than it may


class _Worker:
    """What a worker knows since it was set up."""

    confinement: Confinement | None = None
    limits: dict[str, int]
    soiled: bool = False


def set_up(isolation: str, readable: Sequence[str], hidden: Sequence[str], disk: int, limits: dict[str, int]) -> None:
    """Make this worker fit for programs. ``isolation``: "namespaces", which it enters; "bubblewrap", which started it;
    or "none". Nothing can be imported from ``hidden`` folders. Raises ``WhetError`` where it can't be."""
    for name in (*_WARM, *_WARMER):
        importlib.import_module(name)
    _Worker.limits = limits
    if isolation != "none":
        paths = [path for path in sys.path if any(path.startswith(place) for place in readable) and path not in hidden]
        sys.path[:] = dict.fromkeys(paths + [path for path in readable if path not in needed_by_python()])
        sys.orig_argv = []  # of which the owner's folders are a part
        try:
            stranger = enter(readable, hidden, disk) if isolation == "namespaces" else False
            _Worker.confinement = Confinement([*readable, "/dev"], ["/tmp", "/dev/null"], stranger)
        except OSError as error:
            raise WhetError(str(error)) from None
    gc.freeze()  # what is there stays shared with the copies


def run(name: str, seconds: float, source: int, given: int, out: int, err: int, *checks: int) -> Status:
    """Run a program as the module of that ``name``, for so many ``seconds``. The rest are numbers of open files: its
    ``source``, its input, what it prints and complains of; ``checks``: its tests and what they complain of."""
    if _Worker.soiled:
        os._exit(1)  # the program before left what can't be removed; a fresh worker takes over
    folder = "/tmp" if _Worker.confinement else tempfile.mkdtemp(prefix="whet-program-")
    copies = list[int]()
    try:
        if checks:
            (tests, verdict), (link, other) = checks, socket.socketpair()
            with link, other:
                program = partial(answer_calls, partial(load_program, 4, name), 3)
                copies.append(_copy(program, folder, given, out, err, link.fileno(), source))
                link.close()  # open in the program's copy alone now, so that its end is seen
                copies.append(_copy(partial(run_tests, 3, 4), "/", given, verdict, verdict, other.fileno(), tests))
        else:
            copies.append(_copy(partial(load_program, 3, name), folder, given, out, err, source))
        waiting = os.pidfd_open(copies[-1])
        in_time = bool(select.select([waiting], [], [], seconds)[0])
        os.close(waiting)
    finally:
        statuses = [_end(copy) for copy in copies]
        for file in (source, given, out, err, *checks):
            os.close(file)
        _Worker.soiled = not _emptied(folder)
    return {"status": statuses[-1], "late": not in_time or -signal.SIGXCPU in statuses}


def _copy(body: Callable[[], object], folder: str, *files: int) -> int:
    """Have a confined copy of this process run ``body`` in ``folder``, with these ``files`` as its 0, 1, 2 ... and no
    other. Return its number. Raises ``WhetError`` where it can't be confined."""
    problem, tell = os.pipe()
    if not (process := os.fork()):
        try:
            os.setsid()
            away = [fcntl.fcntl(file, fcntl.F_DUPFD, AWAY) for file in files]
            tell = fcntl.fcntl(tell, fcntl.F_DUPFD, AWAY)
            for number, file in enumerate(away):
                os.dup2(file, number)
            os.chdir(folder)
            limit(**_Worker.limits)
            if _Worker.confinement:
                _Worker.confinement.put_on()
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.closerange(len(files), 4096)
        os._exit(_as_main(body))
    os.close(tell)
    with open(problem, "rb") as stream:
        if said := stream.read():
            _end(process)
            raise WhetError(f"a program could not be confined: {said.decode()}")
    return process


def _as_main(body: Callable[[], object]) -> int:
    """Run ``body`` as an interpreter runs its program, to the end of its threads. Return the exit status."""
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.argv, status = ["program.py"], 0
    for part in (body, threading._shutdown, atexit._run_exitfuncs, lambda: sys.stdout.flush()):  # type: ignore[attr-defined]
        try:
            part()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            status = 1
            traceback.print_exc(limit=-3)
    return status & 0xFF


def _end(process: int) -> int:
    """Kill a copy, and those in its group. Return its status: its own, if it had ended."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _emptied(folder: str) -> bool:
    """Empty the folder, in a copy of this process, for names of files are a program's secrets, too; then no sign of
    the program is left on it. Return whether all that can be done."""
    if _Worker.confinement:
        os.chmod(folder, 0o1777)
        os.utime(folder, (0, 0))
        used = os.statvfs(folder)
        if used.f_files - used.f_ffree == 1:  # the folder itself
            return True
    if process := os.fork():
        return os.waitpid(process, 0)[1] == 0
    with contextlib.suppress(BaseException):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError, RecursionError):
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        if not _Worker.confinement:
            os.rmdir(folder)
            os._exit(0)
        os._exit(bool(os.listdir(folder)))
    os._exit(bool(_Worker.confinement))
