"""A sandbox for untrusted programs, such as code that a model wrote.

    Sandbox ── Pool ── worker: enters namespaces, Landlock, seccomp, limits (``namespaces``, ``confinement``)
                         └── a forked copy for each program (``programs``), another for its tests (``remote_calls``)

Sources, inputs, tests and outputs are files in memory that the worker passes on without reading them, so the memory
that a program inherits from it contains nothing of other programs.

It fails closed: if the system can't isolate programs, none runs, unless the caller asks for ``none``.
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
from whet.sandbox.namespaces import bubblewrap_command, package_folders, python_paths
from whet.sandbox.programs import Status

UNPROTECTED = "sandbox: none: code of the model runs with your rights"

Isolation = Literal["namespaces", "bubblewrap", "none"]
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "bubblewrap")
_EXTRA_S = 20.0  # seconds for a worker beyond a program's deadline
_ENVIRONMENT = ("env", "-i", "LANG=C.UTF-8", "PYTHONHASHSEED=0")  # without the run's variables, such as keys

# Prints each forbidden action that succeeded.
_PROBE = """
import os, socket
for action, attempt in {{
    "use the network": lambda: socket.socket(),
    "start a process": lambda: os.fork() or os._exit(0),
    "read the home folder": lambda: os.listdir({home!r}),
    "read /etc/passwd": lambda: open("/etc/passwd"),
    "write outside of /tmp": lambda: open("/whet", "w"),
    "see other processes": lambda: os.listdir("/proc/1"),
}}.items():
    try:
        attempt()
        print(action)
    except OSError:
        pass
open("/tmp/whet", "w").close()
"""


class ProgramLimits(Config):
    """Limits of one program. It can start threads, but not processes."""

    workers: int = Field(default=2, ge=1, le=1000)
    """Number of programs that run at the same time."""
    cpu_s: int = Field(default=5, ge=1)
    """CPU seconds."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Seconds of wall-clock time; generous, for busy machines."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space, including some 60 MiB of the interpreter."""
    disk_mib: int = Field(default=16, ge=1)
    """Size of all files that it writes."""
    output_kib: int = Field(default=16384, ge=1)
    """Length at which its output is cut."""
    files: int = Field(default=64, ge=8)
    """Number of open files."""
    threads: int = Field(default=32, ge=1)
    readable: tuple[str, ...] = ()
    """Folders that programs may read and import from, in addition to Python's standard library."""


class ProgramResult(Status):
    """The status and output of a program."""

    cut: bool  # the output was longer than the limit
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Checks:
    """Tests of a program's functions. They run in a separate process, so that the program can't read them."""

    source: str
    """Python code that raises an error, usually ``AssertionError``, if a test fails."""
    names: dict[str, str]
    """The functions that the tests use: name in the tests -> name in the program."""


class Sandbox:
    """Warm workers that run programs. The caller closes it."""

    def __init__(self, limits: ProgramLimits | None = None, isolation: Isolation | None = None) -> None:
        """``isolation``: by default the one that works on this system. Raises ``ConfigError`` if none does."""
        self.limits = limits or ProgramLimits()
        kind, disk = isolation or require_isolation(), self.limits.disk_mib << 20
        folders = [os.path.abspath(path) for path in self.limits.readable]
        for path in folders:
            if f"{path}/".startswith("/tmp/") and kind != "none":
                raise ConfigError(
                    f"limits.readable: {path} is in /tmp, which is empty for programs; move it to another folder"
                )
            if not Path(path).exists():
                raise ConfigError(f"limits.readable: {path} does not exist")
        readable = [*python_paths(), *folders]
        hidden = [path for path in package_folders() if not any(folder.startswith(path) for folder in folders)]
        under = [*_ENVIRONMENT, *(bubblewrap_command(readable, disk) if kind == "bubblewrap" else [])]
        bounds = {"cpu": self.limits.cpu_s, "as": self.limits.memory_mib << 20, "core": 0}
        bounds["fsize"] = max(disk, (self.limits.output_kib << 10) + 1)  # one more byte shows that an output is cut
        bounds |= {"nofile": self.limits.files} | ({} if kind == "none" else {"nproc": self.limits.threads + 3})
        deadline = self.limits.deadline_s + _EXTRA_S
        self._pool = Pool(
            "whet.sandbox.programs:set_up",
            WorkerLimits(workers=self.limits.workers, cpu_s=None, deadline_s=deadline, memory_gib=None),
            arguments=(kind, readable, hidden, disk, bounds),
            under=under,
        )
        self.close = self._pool.close

    async def run(self, source: str, stdin: str = "", checks: Checks | None = None) -> ProgramResult:
        """Run a program; with ``checks``, the status is that of the tests. Raises ``CallCrash`` or ``CallTimeout`` if
        it breaks two workers, ``WhetError`` if no worker can start."""
        return await asyncio.wrap_future(self.submit(source, stdin, checks))

    def submit(self, source: str, stdin: str = "", checks: Checks | None = None) -> Future[ProgramResult]:
        """Do the same for callers without an event loop."""
        contents = [source.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "replace"), b"", b""]
        if checks is not None:
            contents += [json.dumps(asdict(checks)).encode(), b""]
        around = partial(_with_files, contents, self.limits.output_kib << 10)
        name = "__main__" if checks is None else "program"
        return self._pool.submit("whet.sandbox.programs:run", name, self.limits.deadline_s, around=around)


def _with_files(contents: Sequence[bytes], limit: int, run: Callable[[Sequence[int]], Status]) -> ProgramResult:
    """Run a program with files in memory of these ``contents``: its source, stdin, stdout and stderr, then its tests
    and their output. Return its result, with at most ``limit`` bytes of each output."""
    with ExitStack() as stack:
        files = []
        for content in contents:
            file = stack.enter_context(open(os.memfd_create("program"), "w+b", buffering=0))
            file.write(content)
            file.seek(0)
            files.append(file.fileno())
        status = run(files)
        out, err = (os.pread(file, limit + 1, 0) for file in (files[2], files[-1]))
        texts = (text[:limit].decode("utf-8", "replace") for text in (out, err))
        return {**status, "cut": len(out) > limit, "out": next(texts), "err": next(texts)}


def is_unprotected(recipe: object) -> bool:
    """Return whether any part of a recipe, given as plain data, has ``sandbox: none``."""
    if isinstance(recipe, Mapping):
        return recipe.get("sandbox") == "none" or any(map(is_unprotected, recipe.values()))
    return isinstance(recipe, list | tuple) and any(map(is_unprotected, recipe))


def require_isolation() -> Isolation:
    """Return the isolation that works on this system. Raises ``ConfigError`` with the problems if none does."""
    kind, problems = available_isolation()
    if kind is None:
        raise ConfigError(
            f"programs of a model can't be isolated here ({'; '.join(problems)}). The sandbox needs Linux 5.13 or "
            "later with Landlock, and user namespaces or bubblewrap; in a container, they must be allowed (docker run "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined). To run them unprotected, with your "
            "rights: data.sandbox=none"
        )
    return kind


@cache
def available_isolation() -> tuple[Isolation | None, list[str]]:
    """Return the first isolation in which a test program can do nothing forbidden, or None; and the problems of the
    ones before it."""
    problems = []
    for kind in ISOLATIONS:
        if kind == "bubblewrap" and not bubblewrap_command([], 0):
            problems.append("bubblewrap: not installed")
            continue
        sandbox = Sandbox(ProgramLimits(workers=1), kind)
        try:
            result = sandbox.submit(_PROBE.format(home=os.path.expanduser("~"))).result()
        except WhetError as error:
            problems.append(f"{kind}: {error}")
            continue
        finally:
            sandbox.close()
        if result["status"] == 0 and not result["out"]:
            return kind, problems
        problems.append(f"{kind}: a program can {result['out'] or result['err']}")
    return None, problems
