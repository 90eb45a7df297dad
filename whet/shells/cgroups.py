"""A cgroup (version 2) around a local runtime, where the system lets this user make one: the kernel then limits the
memory and the processes of the whole runtime at every moment.

    the nearest cgroup above the run that hands out "memory" and "pids", and in which this user may make others
       └── whet-PID-NUMBER     memory.max, memory.swap.max, pids.max, of one runtime

Everything fails softly: without such a cgroup a runtime has the limits of ``inside.py`` alone.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from whet.shells.runtime import ShellLimits

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NEEDED = {"memory", "pids"}
_BESIDES_MIB, _BESIDES_PROCESSES = 64, 4  # of process 1, its starter, and the kernel
_FOLDERS = 4  # folders of a runtime, whose files are in memory
_ROUNDS, _PAUSE = 200, 0.01  # of the removal, because killed processes take a moment to end; the pauses are seconds
_numbers = count()


class Cgroup:
    """A new cgroup below ``parent``."""

    def __init__(self, parent: Path, limits: Mapping[str, int]) -> None:
        """Raises ``OSError`` if it can't be made."""
        self.path = parent / f"whet-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            for name, limit in limits.items():
                (self.path / name).write_text(str(limit))
        except OSError:
            self.remove()
            raise

    def add(self, process: int) -> None:
        """Move a process into it; its later children are in it as well. Raises ``OSError``."""
        (self.path / "cgroup.procs").write_text(str(process))

    @property
    def killed(self) -> int:
        """The number of processes that the kernel has killed because all together used too much memory."""
        with suppress(OSError, ValueError):
            rows = (line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(dict(rows).get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        """Kill all processes in it and remove it."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        for _ in range(_ROUNDS):
            try:
                return self.path.rmdir()
            except FileNotFoundError:
                return None
            except OSError:
                time.sleep(_PAUSE)
        return None


def cgroup_of(process: int, limits: ShellLimits) -> Cgroup | None:
    """Return a new cgroup for the first process of a runtime, which is in it; None where there can be none. It allows a
    little more than the limits, which hold inside: what a command sees is the same with it and without."""
    if (parent := _delegated()) is None:
        return None
    _remove_abandoned(parent)
    memory = limits.memory_mib + _FOLDERS * limits.disk_mib + _BESIDES_MIB
    try:
        group = Cgroup(parent, {"memory.max": memory << 20, "pids.max": limits.processes + _BESIDES_PROCESSES})
    except OSError:
        return None
    with suppress(OSError):  # a kernel that doesn't count swap
        (group.path / "memory.swap.max").write_text("0")
    try:
        group.add(process)
    except OSError:
        group.remove()
        return None
    return group


def _delegated() -> Path | None:
    """Return the nearest cgroup above this process, or its own, in which this user may limit others."""
    try:
        name = next(line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::"))
        place = MOUNT / name.strip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(MOUNT):
                return None
            handed_out = set((folder / "cgroup.subtree_control").read_text().split())
            writable = all(os.access(path, os.W_OK) for path in (folder, folder / "cgroup.procs"))
            if handed_out >= _NEEDED and writable:
                return folder
    except (OSError, StopIteration):  # no cgroups of version 2, or none of this process
        pass
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove the cgroups of runs that were killed."""
    for path in parent.glob("whet-*-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            with suppress(OSError):  # there are processes in it
                path.rmdir()
