"""A sandbox for programs that nobody has read: what a model writes, above all.

    Sandbox ── Pool ── worker: enters namespaces, Landlock, seccomp, limits (``namespaces``, ``confinement``)
                         └── a copy for each program (``programs``), its tests in another (``remote_calls``)

Sources, inputs, tests and outputs are files in memory that pass through the worker unread, so that no program finds
anything of another one in the memory that it was copied from.

It fails closed: where the system can't isolate, nothing runs, unless whoever opens it asks for ``none``.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.base.errors import ConfigError, WhetError
from whet.config import Config
from whet.processes.pool import Pool, WorkerLimits
from whet.sandbox.namespaces import bubblewrap, installed, needed_by_python
from whet.sandbox.programs import Status

UNPROTECTED = "sandbox: none: what the model writes runs with your rights"

Isolation = Literal["namespaces", "bubblewrap", "none"]
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "bubblewrap")
_ROOM_S = 20.0  # that a worker has beyond a program's deadline
_ENVIRONMENT = ("env", "-i", "LANG=C.UTF-8", "PYTHONHASHSEED=0")  # nothing of ours, such as keys

# Says what it could do and must not be able to.
_PROBE = """
import os, socket
for what, attempt in {{
    "use the network": lambda: socket.socket(),
    "start a process": lambda: os.fork() or os._exit(0),
    "read the home folder": lambda: os.listdir({home!r}),
    "read /etc/passwd": lambda: open("/etc/passwd"),
    "write outside of /tmp": lambda: open("/whet", "w"),
    "see other processes": lambda: os.listdir("/proc/1"),
}}.items():
    try:
        attempt()
        print(what)
    except OSError:
        pass
open("/tmp/whet", "w").close()
"""


class ProgramLimits(Config):
    """What one program may cost. It can start threads, but no process."""

    workers: int = Field(default=2, ge=1, le=1000)
    """Programs that run at the same time."""
    cpu_s: int = Field(default=5, ge=1)
    """CPU seconds."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Wall clock; generous, for machines that are busy."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space, with some 60 MiB of the interpreter's own."""
    disk_mib: int = Field(default=16, ge=1)
    """All files that it writes; each output, too."""
    output_kib: int = Field(default=16384, ge=1)
    """How much of its output counts."""
    files: int = Field(default=64, ge=8)
    """Files open at the same time."""
    threads: int = Field(default=32, ge=1)
    readable: tuple[str, ...] = ()
    """Folders that programs may read and import from, beside Python's standard library."""


class Ended(Status):
    """How a program ended, and what it printed."""

    cut: bool  # it printed more than counts
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Checks:
    """Tests of a program's functions. They run in a process of their own, so that the program never knows them."""

    source: str
    """Raises an error, ``AssertionError`` as a rule, where a test fails."""
    names: dict[str, str]
    """What the program's functions are called there: name in the tests -> name in the program."""


class Sandbox:
    """Warm workers that run programs. Whoever opens it closes it."""

    def __init__(self, limits: ProgramLimits | None = None, isolation: Isolation | None = None) -> None:
        """``isolation``: by default what this system offers. Raises ``ConfigError`` where it offers none."""
        self.limits = limits or ProgramLimits()
        kind, disk = isolation or required(), self.limits.disk_mib << 20
        own = [os.path.abspath(path) for path in self.limits.readable]
        for path in own:
            if f"{path}/".startswith("/tmp/") and kind != "none":
                raise ConfigError(
                    f"limits.readable: {path} lies in /tmp, which is empty for programs; put it elsewhere"
                )
            if not Path(path).exists():
                raise ConfigError(f"limits.readable: {path} is not there")
        readable = [*needed_by_python(), *own]
        hidden = [path for path in installed() if not any(one.startswith(path) for one in own)]
        under = [*_ENVIRONMENT, *(bubblewrap(readable, disk) if kind == "bubblewrap" else [])]
        bounds = {"cpu": self.limits.cpu_s, "as": self.limits.memory_mib << 20, "fsize": disk, "core": 0}
        bounds |= {"nofile": self.limits.files} | ({} if kind == "none" else {"nproc": self.limits.threads + 3})
        deadline = self.limits.deadline_s + _ROOM_S
        self._pool = Pool(
            "whet.sandbox.programs:set_up",
            WorkerLimits(workers=self.limits.workers, cpu_s=None, deadline_s=deadline, memory_gib=None),
            arguments=(kind, readable, hidden, disk, bounds),
            under=under,
        )
        self.close = self._pool.close

    async def run(self, source: str, stdin: str = "", checks: Checks | None = None) -> Ended:
        """Run a program; with ``checks``, they decide how it ended. Raises ``CallCrash`` or ``CallTimeout`` where it
        breaks two workers, ``WhetError`` where none can start."""
        return await asyncio.wrap_future(self.submit(source, stdin, checks))

    def submit(self, source: str, stdin: str = "", checks: Checks | None = None) -> Future[Ended]:
        """Do the same for callers without an event loop."""
        given = [source.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "replace"), b"", b""]
        if checks is not None:
            given += [json.dumps(asdict(checks)).encode(), b""]
        around = partial(_with_files, given, self.limits.output_kib << 10)
        name = "__main__" if checks is None else "program"
        return self._pool.submit("whet.sandbox.programs:run", name, self.limits.deadline_s, around=around)


def _with_files(given: Sequence[bytes], most: int, run: Callable[[Sequence[int]], Status]) -> Ended:
    """Run a program with files in memory that hold what is ``given``: its source, its input, its output and complaints,
    then its tests and theirs. Return how it ended, with so many bytes, at ``most``, of what was written there."""
    with ExitStack() as stack:
        files = []
        for content in given:
            file = stack.enter_context(open(os.memfd_create("program"), "w+b", buffering=0))
            file.write(content)
            file.seek(0)
            files.append(file.fileno())
        status = run(files)
        out, err = (os.pread(file, most + 1, 0) for file in (files[2], files[-1]))
        texts = (text[:most].decode("utf-8", "replace") for text in (out, err))
        return {**status, "cut": len(out) > most, "out": next(texts), "err": next(texts)}


def unprotected(recipe: object) -> bool:
    """Whether some part of a recipe, given as plain data, says ``sandbox: none``."""
    if isinstance(recipe, Mapping):
        return recipe.get("sandbox") == "none" or any(map(unprotected, recipe.values()))
    return isinstance(recipe, list | tuple) and any(map(unprotected, recipe))


def required() -> Isolation:
    """The isolation that this system offers. Raises ``ConfigError`` with what is missing where it offers none."""
    kind, problems = offered()
    if kind is None:
        raise ConfigError(
            f"programs of a model can't be isolated here ({'; '.join(problems)}). The sandbox needs Linux 5.13 or "
            "later with Landlock, and user namespaces or bubblewrap; in a container, they must be allowed (docker run "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined). To run them unprotected, with your "
            "rights: data.sandbox=none"
        )
    return kind


@cache
def offered() -> tuple[Isolation | None, list[str]]:
    """The first isolation in which a program that tries can do nothing that it must not; what is wrong with others."""
    problems = []
    for kind in ISOLATIONS:
        if kind == "bubblewrap" and not bubblewrap([], 0):
            problems.append("bubblewrap: not installed")
            continue
        sandbox = Sandbox(ProgramLimits(workers=1), kind)
        try:
            ended = sandbox.submit(_PROBE.format(home=str(Path.home()))).result()
        except WhetError as error:
            problems.append(f"{kind}: {error}")
            continue
        finally:
            sandbox.close()
        if ended["status"] == 0 and not ended["out"]:
            return kind, problems
        problems.append(f"{kind}: a program can {ended['out'] or ended['err']}")
    return None, problems
