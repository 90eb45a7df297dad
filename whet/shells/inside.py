"""Process 1 of a local runtime: it runs commands and reads and writes files, each in a confined fork.

    owner ── Child ── process 1, which enters the namespaces with the first request
                         └── fork, another user, Landlock, seccomp, limits: bash, or the code for one request

At the end of a request it kills every other process of the namespace and waits for all of them. It never opens a file
that a command can have written, so links in the work folder lead nowhere that a command can't reach.
"""

import fcntl
import io
import json
import os
import select
import signal
import socket
import stat
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from whet.processes.child import Answer
from whet.sandbox.confinement import Confinement
from whet.sandbox.forks import confined_fork
from whet.sandbox.namespaces import enter_namespaces
from whet.shells.archives import carried
from whet.shells.links import LINK_PORT
from whet.shells.output import Output
from whet.shells.places import ENVIRONMENT, FILE_PROBLEM, LOGS, TESTS, Ending

_WATCH_S = 0.1  # seconds between two looks at the memory
_SET_FLAGS, _UP = 0x8914, 1  # of a network interface; netdevice(7)


def make() -> Answer:
    """Return the function that answers requests: a line of JSON, ``[name, arguments]``, then bytes."""
    inside: list[_Inside] = []

    def answer(request: bytearray, *files: int) -> bytes:
        line, _, content = bytes(request).partition(b"\n")
        name, arguments = json.loads(line)
        try:
            if name == "enter":
                inside.append(_Inside(**arguments))
                return b'[0, "exit"]\n'
            if name == "listen":
                _hand_over_listener(files[0])
                return b'[0, "exit"]\n'
            status, ending, output = inside[0].job(name, content, **arguments)
        except Exception as error:
            return json.dumps([None, f"{type(error).__name__}: {error}"]).encode() + b"\n"
        return json.dumps([status, ending]).encode() + b"\n" + output

    return answer


class _Inside:
    """The state of process 1."""

    def __init__(
        self,
        readable: Sequence[str],
        hidden: Sequence[str],
        work: str,
        disk: int,
        memory: int,
        processes: int,
        linked: bool,
    ) -> None:
        folders = ("/tmp", work, TESTS, LOGS)
        two_users = enter_namespaces(readable, hidden, disk, folders, shell=True)
        places = [*readable, "/dev", "/proc"], [*folders, "/dev/null"]
        self.confinement = Confinement(*places, two_users, processes=True, loopback=linked)
        self.memory, self.work = memory, work
        self.bounds = {"as": memory, "fsize": disk, "core": 0, "nofile": 256, "nproc": processes}

    def job(
        self, name: str, content: bytes, seconds: float, keep: int, path: str = "", folder: str = ""
    ) -> tuple[int, Ending, bytes]:
        """Do one request in a fork, for at most ``seconds``. Return its exit status, its ending and its output, of
        which at most ``keep`` bytes stay."""
        bodies: dict[str, Callable[[], None]] = {
            "run": partial(_execute, content.decode("utf-8", "surrogateescape"), self.work),
            "read": partial(_read, path, keep),
            "write": partial(_write, path, content),
            "snapshot": _snapshot,
            "restore": partial(_restore, content),
        }
        (output, writer), (errors, reporter), nothing = os.pipe(), os.pipe(), os.open("/dev/null", os.O_RDONLY)
        os.set_blocking(output, False)
        os.fchmod(writer, 0o666)  # for commands that open /dev/stdout, as another user
        try:
            files = (nothing, writer, writer if name == "run" else reporter)
            process = confined_fork(
                partial(_run, bodies[name]), folder or self.work, files, self.bounds, self.confinement
            )
        finally:
            for file in (nothing, writer, reporter):
                os.close(file)
        with open(output, "rb", 0), open(errors, "rb", 0) as reports:
            collected = Output(keep, cut_middle=name == "run")
            ending = self._wait(process, output, collected, time.monotonic() + seconds)
            status = _end_all(process)
            collected.drain(output)
            return status, ending, reports.read() or collected.bytes()

    def _wait(self, process: int, reader: int, output: Output, until: float) -> Ending:
        """Wait until the process ends or a limit is exceeded, and collect its output."""
        waiting, looked = os.pidfd_open(process), 0.0
        try:
            while True:
                left = until - time.monotonic()
                if left <= 0:
                    return "time"
                ready = select.select([waiting] + [reader] * output.open, [], [], min(left, _WATCH_S))[0]
                if waiting in ready:
                    return "exit"
                if reader in ready:
                    output.take(reader)
                if time.monotonic() - looked > _WATCH_S:
                    if _memory_at_most() > self.memory and _memory_used() > self.memory:
                        return "memory"
                    looked = time.monotonic()
        finally:
            os.close(waiting)


def _hand_over_listener(receiver: int) -> None:
    """Start the network interface of loopback, the only one inside, and hand a socket that listens on it to the owner,
    through another socket."""
    with socket.socket() as listener, socket.socket(fileno=receiver) as sent:
        fcntl.ioctl(listener, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in whet/base/listening.py
        listener.bind(("127.0.0.1", LINK_PORT))
        listener.listen()
        socket.send_fds(sent, [b"x"], [listener.fileno()])


def _end_all(process: int) -> int:
    """Kill all other processes of the namespace and wait for them: process 1 is the parent of every orphan. Return the
    exit status of ``process``, or minus the signal."""
    status = 0
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            ended, how = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == process:
            status = os.waitstatus_to_exitcode(how)


def _memory_at_most() -> int:
    """Return an upper bound of ``_memory_used`` that is found quickly: what processes share counts for each of them."""
    return sum(_kibibytes(folder / "status", "RssAnon", "RssShmem") for folder in _others()) << 10


def _memory_used() -> int:
    """Return the bytes that the other processes use, without files of the system that they map. What several processes
    share counts once."""
    return sum(map(_share, _others())) << 10


def _others() -> Iterator[Path]:
    return (folder for folder in Path("/proc").glob("[0-9]*") if folder.name != "1")


def _share(folder: Path) -> int:
    """Return the share of a process in what is used, in KiB; all that it uses where the kernel does not tell."""
    return _kibibytes(folder / "smaps_rollup", "Pss_Anon", "Pss_Shmem") or _kibibytes(
        folder / "status", "RssAnon", "RssShmem"
    )


def _kibibytes(file: Path, *names: str) -> int:
    """Return the sum of the values of these lines in a file of ``/proc``; 0 for one that can't be read."""
    with suppress(OSError, ValueError):  # the process has ended
        lines = (line.split() for line in file.read_text().splitlines())
        return sum(int(words[1]) for words in lines if words[0].rstrip(":") in names)
    return 0


def _run(body: Callable[[], None]) -> int:
    """Run ``body`` and return its exit status. The error of a file is written to descriptor 2."""
    try:
        body()
        return 0
    except OSError as error:
        name = os.path.basename(error.filename) if isinstance(error.filename, str) else ""
        problem = f"{name}: {error.strerror or error}".removeprefix(": ")
    except (tarfile.TarError, RecursionError, MemoryError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    os.write(2, problem[:500].encode("utf-8", "replace"))
    return FILE_PROBLEM


def _execute(command: str, home: str) -> None:
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    os.execve("/bin/bash", ["bash", "-c", command], ENVIRONMENT | {"HOME": home})


def _read(path: str, limit: int) -> None:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        raise OSError(0, "not a regular file", path)
    with open(opened, "rb") as file:
        _write_all(1, file.read(limit))


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        raise OSError(0, "not a regular file", path)
    _write_all(opened, content)


def _snapshot() -> None:
    def regular(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.islnk():  # a further name of a file is a file
            member.type, member.linkname, member.size = tarfile.REGTYPE, "", os.lstat(member.name).st_size
        return member if member.isreg() or member.isdir() or member.issym() else None

    with open(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(".", recursive=True, filter=regular)


def _restore(archive: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        tar.extractall(".", filter=carried)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
