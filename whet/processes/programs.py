"""Programs of strangers, run in copies of a warm worker: inside the namespaces that it entered, each within limits of
its own, and nothing of it left when the next one starts.

    worker, process 1 of its world
      ├── copy: the program ◀── calls, values ──▶ copy: its tests, where it has any
      │     stdin, stdout, stderr: files in memory
      └── /tmp, emptied after each run

The tests come as a file that the worker itself never reads, so that no program is copied from a process that knows
them. Who waits for whom: the worker waits for the tests, or else for the program, until the deadline, and kills both.
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

from whet.errors import WhetError
from whet.processes.confinement import AWAY, Confinement, limit
from whet.processes.namespaces import enter
from whet.processes.remote_calls import answer_calls, load_program, run_tests

_WARM = ("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "io")
_WARMER = ("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing")


class Ended(TypedDict):
    """How a program ended; where it has tests, how they did."""

    status: int  # the exit status, or minus the signal that killed it
    late: bool  # it took more time than it may
    out: str  # what the program printed
    err: str


class _Worker:
    """What a worker knows since it was set up."""

    confinement: Confinement | None = None
    limits: dict[str, int]
    output: int


def set_up(isolation: str, readable: Sequence[str], disk: int, output: int, limits: dict[str, int]) -> None:
    """Make this worker fit for programs. ``isolation``: "namespaces", which it enters; "bubblewrap", which started it;
    or "none". ``output``: bytes that are kept of what a program prints. Raises ``WhetError`` where it can't be."""
    for name in (*_WARM, *_WARMER):
        importlib.import_module(name)
    _Worker.limits, _Worker.output = limits, output
    if isolation != "none":
        sys.path[:] = [path for path in sys.path if any(path.startswith(place) for place in readable)]
        try:
            stranger = enter(readable, disk) if isolation == "namespaces" else False
            _Worker.confinement = Confinement([*readable, "/dev"], ["/tmp", "/dev/null"], stranger)
        except OSError as error:
            raise WhetError(str(error)) from None
    gc.freeze()  # what is there stays shared with the copies


def run(source: str, stdin: str, name: str, seconds: float, *tests: int) -> Ended:
    """Run a program as the module of that ``name``, for so many ``seconds``. ``tests``: the number of the file with
    what calls its functions."""
    folder = "/tmp" if _Worker.confinement else tempfile.mkdtemp(prefix="whet-program-")
    if os.listdir(folder):
        os._exit(1)  # the program before left what can't be removed; a fresh worker takes over
    given, out, err, verdict = files = [os.memfd_create(one) for one in ("in", "out", "err", "verdict")]
    files += tests
    with open(given, "wb", closefd=False) as stream:
        stream.write(stdin.encode("utf-8", "replace"))
    os.lseek(given, 0, os.SEEK_SET)
    load, copies = partial(load_program, source, name), list[int]()
    try:
        if tests:
            one, other = socket.socketpair()
            with one:  # which is open in its copy alone then, so that its end is seen
                copies.append(_copy(lambda: answer_calls(load, 3), folder, given, out, err, one.fileno()))
            with other:
                copies.append(_copy(lambda: run_tests(3, 4), "/", given, verdict, verdict, other.fileno(), *tests))
        else:
            copies.append(_copy(load, folder, given, out, err))
        files.append(waiting := os.pidfd_open(copies[-1]))
        in_time = bool(select.select([waiting], [], [], seconds)[0])
    finally:
        statuses = [_end(copy) for copy in copies]
        printed, complaints = (_text(one, _Worker.output) for one in (out, verdict if tests else err))
        for file in files:
            os.close(file)
        _clear(folder)
    late = not in_time or -signal.SIGXCPU in statuses
    return {"status": statuses[-1], "late": late, "out": printed, "err": complaints}


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


def _text(file: int, size: int) -> str:
    return os.pread(file, size, 0).decode("utf-8", "replace")


def _clear(folder: str) -> None:
    """Empty the folder, as far as it can be."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
    if not _Worker.confinement:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
