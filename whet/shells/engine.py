"""A container engine by its command line: Docker, or Podman, which takes the same arguments.

    run, exec, ps, inspect, image inspect, kill, rm, build          https://docs.docker.com/reference/cli/docker/

Each container has a label with the process that owns it. Containers of processes that have ended are removed by the
next run on this machine. Knows no episodes.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile

from whet.base.errors import CallError
from whet.processes.machine import start_time

LABEL = "whet.owner"
_ANSWER_S = 60.0  # seconds for an answer of a busy engine
_MESSAGE_BYTES = 1000  # of what the engine says about a problem


class EngineProblem(CallError):
    """The engine refused or failed; the message is what it said."""


class Engine:
    """The command line of a container engine."""

    def __init__(self, command: str) -> None:
        self.command = command

    def ask(self, *arguments: str, seconds: float = _ANSWER_S) -> str:
        """Run one command of the engine and return its output. Raises ``EngineProblem``."""
        with TemporaryFile() as errors:
            process = self.start(arguments, subprocess.DEVNULL, errors.fileno())
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise EngineProblem(f"{self.command} {arguments[0]} gave no answer within {seconds:g} s") from None
            if process.returncode:
                raise EngineProblem(f"{self.command} {arguments[0]}: {error_text(errors.fileno())}")
            return output.decode("utf-8", "replace").strip()

    def start(self, arguments: Sequence[str], given: int, errors: int) -> subprocess.Popen[bytes]:
        """Start one command of the engine with its output in a pipe. Raises ``EngineProblem`` if it isn't there."""
        try:
            return subprocess.Popen(
                [self.command, *arguments],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # the owner handles interrupts from the keyboard
            )
        except OSError as error:
            raise EngineProblem(f"the command {self.command} does not start: {error.strerror}") from None

    def end(self, container: str) -> None:
        """Kill and remove a container, which may be gone already."""
        for arguments in (("kill", container), ("rm", "--force", "--volumes", container)):  # rm alone may wait for it
            with suppress(EngineProblem):
                self.ask(*arguments)

    def sweep(self) -> int:
        """Remove the containers whose owners on this machine have ended. Return their number. Raises
        ``EngineProblem``."""
        containers = self.ask("ps", "--all", "--quiet", "--filter", f"label={LABEL}").split()
        abandoned = [container for container in containers if _abandoned(self._owner(container))]
        for container in abandoned:
            self.end(container)
        return len(abandoned)

    def _owner(self, container: str) -> str:
        try:
            return self.ask("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', container)
        except EngineProblem:  # it has ended
            return ""


def owner() -> str:
    """Return the name of this process: the machine, the process id and its start time."""
    return f"{socket.gethostname()}/{os.getpid()}/{start_time(os.getpid())}"


def error_text(errors: int) -> str:
    """Return what a command wrote to the open file of its errors."""
    return os.pread(errors, _MESSAGE_BYTES, 0).decode("utf-8", "replace").strip() or "it gave no reason"


def _abandoned(name: str) -> bool:
    machine, _, process = name.partition("/")
    number, _, started = process.partition("/")
    return machine == socket.gethostname() and number.isdecimal() and start_time(int(number)) != started
