"""A runtime in namespaces of this machine, without containers: the system's programs, no network, files in memory.

All files lie in the namespaces, and the kernel ends these with their first process, which ends with the run: after
``kill -9`` of a run no process, folder or mount remains.
"""

import json
import os
import shlex
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError, WhetError
from whet.processes.child import Child
from whet.sandbox.namespaces import package_folders, system_paths
from whet.shells.cgroups import cgroup_of
from whet.shells.links import Link, accepting
from whet.shells.places import FILE_PROBLEM, LOGS, TESTS, WORK, Ending
from whet.shells.runtime import Ended, FileProblem, Runtime, RuntimeFailure, RuntimeKind

_ALONE = ("env", "-i", "LANG=C.UTF-8", "PYTHONHASHSEED=0")  # without the run's variables, such as keys
_EXTRA_S = 30.0  # seconds for process 1 beyond a command's deadline, on a busy machine
_FILES_S = 60.0  # seconds for reading and writing

# Prints each forbidden action that succeeds, and "ready" where allowed actions do.
_PROBE = """
(exec 3<>/dev/tcp/127.0.0.1/1) 2>&1 | grep -q 'not permitted' || echo use the network
ls {home} >/dev/null 2>&1 && echo read the home folder
cat /proc/1/environ >/dev/null 2>&1 && echo read the memory of process 1
touch /usr/whet 2>/dev/null && echo write to /usr
unshare -U true 2>/dev/null && echo make namespaces
touch file && cat <(echo ready)
"""


class Local(RuntimeKind):
    """Namespaces of this machine; see ``docs/shells.md``."""

    readable: tuple[str, ...] = ()
    """Folders that commands may read, in addition to the system's programs; not in /tmp, /work, /tests or /logs, which
    are folders of the runtime itself."""

    def check(self) -> None:
        for path in self.readable:
            place = Path(path).absolute()
            inside = any(place.is_relative_to(folder) for folder in ("/tmp", WORK, TESTS, LOGS))
            if inside or not place.is_dir():
                raise ConfigError(
                    f"readable: {path} is not a folder outside of /tmp, {WORK}, {TESTS} and {LOGS}, which a runtime "
                    "has itself"
                )
        if problem := _problem():
            raise ConfigError(
                f"the runtime local can't isolate commands here ({problem}). It needs Linux 5.13 or later with "
                "Landlock, user namespaces, a whole /proc, and bash; in a container, they must be allowed (docker run "
                "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
                "systempaths=unconfined)"
            )

    def open(self, work: str = WORK, link: Link | None = None) -> "LocalRuntime":
        return LocalRuntime(self, work, link)


class LocalRuntime(Runtime):
    """The owner's side: requests to process 1 of the namespaces."""

    def __init__(self, settings: Local, work: str = WORK, link: Link | None = None) -> None:
        self.limits = settings.limits
        self._child = Child("whet.shells.inside:make", under=_ALONE)
        self._ends = [self._child.kill]
        self._end = weakref.finalize(self, _call_all, self._ends)  # also where a cancelled episode never used it
        folders = [str(Path(path).absolute()) for path in settings.readable]
        self._cgroup = cgroup_of(self._child.process.pid, self.limits)
        if self._cgroup is not None:
            self._ends.append(self._cgroup.remove)
        try:
            self._ask(
                "enter",
                readable=[*system_paths(), *folders],
                hidden=[path for path in package_folders() if not any(folder.startswith(path) for folder in folders)],
                work=work,
                disk=self.limits.disk_mib << 20,
                memory=self.limits.memory_mib << 20,
                processes=self.limits.processes,
                linked=link is not None,
            )
            if link is not None:
                self._ends.append(accepting(self._listener(), link))
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float | None = None, folder: str = "") -> Ended:
        seconds = self.limits.deadline_s if seconds is None else seconds
        content = command.encode("utf-8", "surrogateescape")
        before = self._killed()
        status, ending, output = self._ask(
            "run", content, seconds=seconds, keep=self.limits.output_bytes, folder=folder
        )
        return Ended(status, "memory" if ending == "exit" and self._killed() > before else ending, output)

    def write(self, path: str, content: bytes) -> None:
        self._files("write", content, path=path)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        return self._files("read", path=path, keep=limit)

    def snapshot(self) -> bytes:
        most = (self.limits.disk_mib << 20) * 2
        archive = self._files("snapshot", keep=most + 1)
        if len(archive) > most:
            raise FileProblem(f"the files in the work folder are larger than {self.limits.disk_mib} MiB")
        return archive

    def restore(self, archive: bytes) -> None:
        self._files("restore", archive)

    def close(self) -> None:
        self._end()

    def _killed(self) -> int:
        """Return how many processes the kernel has killed in the cgroup."""
        return 0 if self._cgroup is None else self._cgroup.killed

    def _files(self, name: str, content: bytes = b"", **arguments: Any) -> bytes:
        """Read or write. Raises ``FileProblem`` with the name of the file."""
        status, ending, output = self._ask(name, content, seconds=_FILES_S, **{"keep": 1000, **arguments})
        if status == FILE_PROBLEM:
            raise FileProblem(output.decode("utf-8", "replace"))
        if status or ending != "exit":
            raise FileProblem(f"the file could not be read or written ({ending}, status {status})")
        return output

    def _listener(self) -> socket.socket:
        """Return the socket that listens inside, which process 1 makes and hands over."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._ask("listen", files=[theirs.fileno()])
            return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])

    def _ask(
        self, name: str, content: bytes = b"", files: Sequence[int] = (), **arguments: Any
    ) -> tuple[int, Ending, bytes]:
        """Have process 1 answer a request. Return an exit status, an ending and an output."""
        request = json.dumps([name, arguments]).encode() + b"\n" + content
        try:
            reply = bytes(self._child.exchange(request, arguments.get("seconds", _FILES_S) + _EXTRA_S, files))
        except WhetError as error:
            raise RuntimeFailure(f"the shell of an episode failed: {error}") from None
        line, _, output = reply.partition(b"\n")
        status, ending = json.loads(line)
        if status is None:
            raise RuntimeFailure(f"the shell of an episode failed: {ending}")
        return status, ending, output


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


@cache
def _problem() -> str:
    """Return why commands can't be isolated on this system; empty if they can."""
    try:
        runtime = LocalRuntime(Local())
    except WhetError as error:
        return str(error)
    try:
        ended = runtime.run(_PROBE.format(home=shlex.quote(os.path.expanduser("~"))))
        text = ended.output.decode("utf-8", "replace").strip()
        return (
            "" if text == "ready" else f"a command can {text}" if ended.status == 0 else text or "bash does not start"
        )
    except WhetError as error:
        return str(error)
    finally:
        runtime.close()
