"""A runtime: a separate place for one episode, in which commands run and files lie. A task sees only this interface,
and never which runtime it has.

    local             namespaces of this machine (``local.py``)
    container         a container of Docker or Podman (``container.py``)
    remote            one of these on another machine (``remote.py``, ``serving.py``)

Every command ends with all of its processes: what a task reads afterwards can't change while it reads. What remains is
the files in its folders. A runtime has no network, apart from a link to one place where its owner opens it with one
(``links.py``).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import Field

from whet.base.errors import CallError
from whet.config import Config
from whet.shells.links import Link
from whet.shells.places import WORK, Ending


class RuntimeFailure(CallError):
    """The runtime itself failed, so the episode fails: never a reward."""


class FileProblem(Exception):
    """A file of the runtime can't be read or written, as in "data.txt: No such file or directory"."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a command."""

    status: int  # the exit status, or minus the signal that killed it
    ending: Ending  # it ended by itself, or was killed because it exceeded a limit
    output: bytes  # standard output and standard error, with a note in place of the middle if it was too long


class ShellLimits(Config):
    """Limits of a runtime."""

    deadline_s: float = Field(default=20.0, gt=0)
    """Seconds of one command."""
    memory_mib: int = Field(default=512, ge=64)
    """Memory of all processes together, and the address space of each."""
    disk_mib: int = Field(default=64, ge=1)
    """Size of all files in the work folder."""
    processes: int = Field(default=64, ge=4)
    """Processes and threads at the same time."""
    output_bytes: int = Field(default=3000, ge=100)
    """Length of a command's output; the middle of a longer one is left out."""


class Runtime(ABC):
    """One open runtime. Its methods block, and are called one at a time; its owner closes it."""

    limits: ShellLimits

    @abstractmethod
    def run(self, command: str, seconds: float | None = None, folder: str = "") -> Ended:
        """Run a command of bash in ``folder`` (by default the work folder), for at most ``seconds`` (by default the
        limit), and end all of its processes. Nothing but files remains of it: no change of folder, no variables.
        Raises ``RuntimeFailure``."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file, and the folders above it. A relative path begins in the work folder. Raises ``FileProblem``."""

    @abstractmethod
    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return the first ``limit`` bytes of a regular file. Raises ``FileProblem``."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return the work folder as a tar archive. Raises ``FileProblem`` if it is larger than the disk may be."""

    @abstractmethod
    def restore(self, archive: bytes) -> None:
        """Unpack such an archive into the work folder, without links that are absolute or lead upwards. Raises
        ``FileProblem``."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and remove all files."""


class RuntimeKind(Config, ABC):
    """The settings of a runtime."""

    limits: ShellLimits = ShellLimits()

    @abstractmethod
    def check(self) -> None:
        """Raise ``ConfigError`` if this machine can't open such a runtime, with what to install."""

    @abstractmethod
    def open(self, work: str = WORK, link: Link | None = None) -> Runtime:
        """Return a new runtime with empty folders; ``work`` is the path of its work folder. ``link``: what a connection
        to ``LINK_PORT`` of loopback inside leads to; None: nothing. Raises ``RuntimeFailure``."""
