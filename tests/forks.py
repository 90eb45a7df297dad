"""Programs in forks of a process that has imported everything, which takes seconds in each new one."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Self

from tests.limits import limit
from whet.processes import child

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])


class _Process:
    """The interface of ``subprocess.Popen`` to a fork, which begins a session."""

    def __init__(self, target: Callable[..., object], *arguments: object) -> None:
        self.process = PROCESSES.Process(target=target, args=arguments, daemon=False)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server may have collected it already
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Also the processes that it started, unless they began other sessions."""
        self.process.kill()  # it may not have its session yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Fork(_Process):
    """A program: ``body`` is called with ``words`` as ``sys.argv``; ``environment`` is added to this process's. Both
    outputs are pipes; ``merged``: errors go to ``stdout``, too."""

    def __init__(
        self,
        body: Callable[[], object],
        *words: str,
        folder: Path | None = None,
        merged: bool = False,
        **environment: str,
    ) -> None:
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(1 if merged else 2)]
        work = (body, words, {**os.environ, **environment}, folder or Path.cwd(), [write for _, write in pipes])
        self.words = words
        super().__init__(_run, *work)
        streams: list[IO[str]] = []
        for read, write in pipes:
            write.close()
            streams.append(os.fdopen(os.dup(read.fileno()), encoding="utf-8"))
            read.close()
        self.stdout, self.stderr = streams[0], streams[-1]

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return the rest of both outputs; if they are merged, as the first. At the time-out the fork is killed."""
        with ThreadPoolExecutor() as threads:
            reads = [threads.submit(stream.read) for stream in dict.fromkeys((self.stdout, self.stderr))]
            try:
                self.wait(timeout)
            finally:
                self.kill()
        out, *err = (read.result() for read in reads)
        return out, "".join(err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.process.join(60)
        self.stdout.close()
        self.stderr.close()


def whet_fork(*arguments: str, folder: Path | None = None, merged: bool = False, **environment: str) -> Fork:
    """Start ``whet ARGUMENTS``."""
    return Fork(_whet, "whet", *arguments, folder=folder, merged=merged, **environment)


def limited_whet_fork(*arguments: str, folder: Path) -> Fork:
    """Start ``whet ARGUMENTS`` with limits, for code that may fork or eat memory."""
    return Fork(_limited_whet, "whet", *arguments, folder=folder, merged=True)


def script_fork(path: Path, *arguments: str, folder: Path) -> Fork:
    """Start ``python PATH ARGUMENTS``."""
    return Fork(partial(_script, path), str(path), *arguments, folder=folder)


def program_fork(
    code: str, *arguments: str, folder: Path | None = None, merged: bool = False, **environment: str
) -> Fork:
    """Start ``python -c CODE ARGUMENTS``."""
    return Fork(partial(_program, code), "-c", *arguments, folder=folder, merged=merged, **environment)


def whet(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """``whet ARGUMENTS`` with what is added to the environment, run to its end."""
    return finished(whet_fork(*arguments, **environment))


def finished(fork: Fork, seconds: float = 480.0) -> "subprocess.CompletedProcess[str]":
    """Return the outcome of a fork that ends by itself within the time."""
    with fork:
        out, err = fork.communicate(seconds)
        return subprocess.CompletedProcess(fork.words, fork.wait(), out, err)


class ForkedChild(_Process):
    """The process of a ``whet.processes.child.Child`` as a fork. ``subprocess.Popen`` has the same arguments."""

    codes: ClassVar[dict[int, str]] = {}
    """By process ID, the code of each that was started."""

    def __init__(self, command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: object) -> None:
        super().__init__(_serve, command[-1], _Inherited(pass_fds[0]), env, Path.cwd())
        self.codes[self.pid] = command[-1]
        with contextlib.suppress(ProcessLookupError):  # ``Child.kill`` kills its process group
            while self.poll() is None and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)


def start_child(command: list[str], **settings: Any) -> "ForkedChild | subprocess.Popen[bytes]":
    """Start a fork; but a real process where another program or interpreter starts the child, as a sandbox does."""
    if command[:-1] == [sys.executable, "-c"]:
        return ForkedChild(command, **settings)
    return subprocess.Popen(command, **settings)


class _Inherited:
    """A file descriptor that a fork has under the same number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _inherit, (self.number, reduction.DupFd(self.number))


def _inherit(number: int, received: Any) -> int:
    return os.dup2(received.detach(), number)


def _serve(code: str, _: int, environment: dict[str, str], folder: Path) -> None:
    child.kill_on_parent_exit = lambda owner: None  # it ends with its socket: the server of the forks is its parent
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    exec(code, {})


def _whet() -> None:
    from whet.cli.main import main

    main()


def _limited_whet() -> None:
    limit()
    _whet()


def _script(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _program(code: str) -> None:
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _run(
    body: Callable[[], object],
    words: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    pipes: list[Connection],
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the background jobs of a shell ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    for number in (1, 2):
        os.dup2(pipes[min(number, len(pipes)) - 1].fileno(), number)
    for pipe in pipes:
        pipe.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(words)
    body()
