"""Processes that are recognised by a variable of their environment, which every child inherits."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWNER = "WHET_OWNER"  # the variable with the process id of the run, by which a program is killed when its run is lost

_ROUNDS = 100  # a process may fork while the others are killed
_PAUSE = 0.01  # seconds


def kill_marked(name: str, value: str, place: Path | None = None) -> None:
    """Kill all processes whose environment has the variable, also a process that has left its process group or session;
    and processes that work in the folder ``place``, whatever their environment. Linux; elsewhere nothing is found."""
    for _ in range(_ROUNDS):
        processes = list(_marked(f"{name}={value}".encode(), place))
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return
        time.sleep(_PAUSE)


def _marked(variable: bytes, place: Path | None) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            marked = variable in (folder / "environ").read_bytes().split(b"\0")
            if marked or (place is not None and (folder / "cwd").readlink().is_relative_to(place)):
                yield int(folder.name)
