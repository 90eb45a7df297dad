"""Untrusted programs, each run in a fork of a warm worker: inside the namespaces that the worker entered, with separate
limits, and removed completely before the next one starts.

    worker, process 1 of its namespaces
      ├── fork: the program ◀── calls, values ──▶ fork: its tests, if any
      │     source, stdin, stdout, stderr: files in memory, created and read by the owner
      └── /tmp, emptied by another fork after each run

A program can read all memory of its process, including the worker's memory at the time of the fork. Therefore the
worker never reads sources, inputs, tests, outputs and results: they are files in memory that it only passes on. Who
waits for whom: the worker waits for the tests, or without tests for the program, until the deadline, and kills both.
"""

import atexit
import builtins
import contextlib
import gc
import importlib
import io
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
from functools import partial, wraps
from typing import Any, TypedDict

from whet.base.errors import WhetError
from whet.sandbox.confinement import Confinement
from whet.sandbox.forks import confined_fork, end
from whet.sandbox.namespaces import enter_namespaces, python_paths
from whet.sandbox.remote_calls import answer_calls, load_program, run_tests

_STREAMS = {f"{folder}{number}": number for number in range(3) for folder in ("/dev/fd/", "/proc/self/fd/")}
_STREAMS |= {f"/dev/{name}": number for number, name in enumerate(("stdin", "stdout", "stderr"))}
_WARM = ("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "io")
_WARMER = ("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing")


class Status(TypedDict):
    """The exit of a program, or of its tests if it has any."""

    status: int  # the exit status, or minus the signal that killed it
    late: bool  # it exceeded its time


class _Worker:
    """The state of a worker, after ``set_up``."""

    confinement: Confinement | None = None
    limits: dict[str, int]
    dirty: bool = False


def set_up(isolation: str, readable: Sequence[str], hidden: Sequence[str], disk: int, limits: dict[str, int]) -> None:
    """Prepare this worker for programs. ``isolation``: "namespaces", which it enters; "bubblewrap", which started it;
    or "none". Nothing can be imported from ``hidden`` folders. Raises ``WhetError`` if isolation fails."""
    for name in (*_WARM, *_WARMER):
        importlib.import_module(name)
    _Worker.limits = limits
    if isolation != "none":
        paths = [path for path in sys.path if any(path.startswith(place) for place in readable) and path not in hidden]
        sys.path[:] = dict.fromkeys(paths + [path for path in readable if path not in python_paths()])
        sys.orig_argv = []  # it contains folders of the owner
        try:
            change_user = enter_namespaces(readable, hidden, disk) if isolation == "namespaces" else False
            _Worker.confinement = Confinement([*readable, "/dev"], ["/tmp", "/dev/null"], change_user)
        except OSError as error:
            raise WhetError(str(error)) from None
    gc.freeze()  # keeps this memory shared with forks


def run(name: str, seconds: float, source: int, stdin: int, stdout: int, stderr: int, *checks: int) -> Status:
    """Run a program as the module ``name``, for at most ``seconds``. The other arguments are descriptors of open files;
    ``checks``: its tests and their output."""
    if _Worker.dirty:
        os._exit(1)  # files of the last program could not be removed; a new worker takes over
    folder = "/tmp" if _Worker.confinement else tempfile.mkdtemp(prefix="whet-program-")
    forks = list[int]()
    try:
        if checks:
            (tests, report), (link, other) = checks, socket.socketpair()
            with link, other:
                program = partial(answer_calls, partial(load_program, 4, name), 3)
                forks.append(_fork(program, folder, stdin, stdout, stderr, link.fileno(), source))
                link.close()  # now open only in the program's fork, so that its end closes the connection
                forks.append(_fork(partial(run_tests, 3, 4), "/", stdin, report, report, other.fileno(), tests))
        else:
            forks.append(_fork(partial(load_program, 3, name), folder, stdin, stdout, stderr, source))
        waiting = os.pidfd_open(forks[-1])
        in_time = bool(select.select([waiting], [], [], seconds)[0])
        os.close(waiting)
    finally:
        statuses = [end(process) for process in forks]
        for file in (source, stdin, stdout, stderr, *checks):
            os.close(file)
        _Worker.dirty = not _clear(folder)
    return {"status": statuses[-1], "late": not in_time or -signal.SIGXCPU in statuses}


def _fork(body: Callable[[], object], folder: str, *files: int) -> int:
    return confined_fork(partial(_as_main, body), folder, files, _Worker.limits, _Worker.confinement)


def _as_main(body: Callable[[], object]) -> int:
    """Run ``body`` like an interpreter runs its main program, until its threads have ended. Return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc,assignment]
    if _Worker.confinement:
        _open_streams_by_name()
    sys.argv, status = ["program.py"], 0
    for part in (body, threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            part()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            status = 1
            traceback.print_exc(limit=-3)
    return status & 0xFF


def _open_streams_by_name() -> None:
    """Let files be opened by the names of the standard streams. These are links to /proc, which the namespaces lack."""

    def with_streams(opening: Callable[..., Any], of_number: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(opening)
        def open_file(file: Any, *args: Any, **named: Any) -> Any:
            number = _STREAMS.get(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
            return opening(file, *args, **named) if number is None else of_number(os.dup(number), *args, **named)

        return open_file

    builtins.open = io.open = with_streams(open, open)
    os.open = with_streams(os.open, lambda number, *args, **named: number)


def _flush() -> None:
    """Write what the program has printed, also where it put another stream in the place of its standard output."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream and not getattr(stream, "closed", False):
            stream.flush()


def _clear(folder: str) -> bool:
    """Empty the folder and reset its mode and times. Return whether that succeeded. Runs in a fork, because file names
    may be secrets of a program, which the worker must not read."""
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
