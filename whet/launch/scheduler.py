"""The interface of schedulers, and the way in which their command-line tools are asked: with a deadline."""

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from whet.base.errors import WhetError
from whet.base.escaping import escape_controls
from whet.base.strict_json import JsonObject
from whet.launch.job import Job, Record

DEADLINE = 20.0
"""Seconds that a scheduler has for an answer."""
SUBMIT = 30.0  # times that deadline, for a new job: images are pulled, machines are found


class SchedulerError(WhetError):
    """A scheduler failed, did not answer, or is not installed."""


@dataclass(frozen=True, slots=True)
class State:
    """A job's state as its scheduler reports it."""

    phase: Literal["queued", "running", "ended", "lost", "unknown"]
    detail: str = ""  # the scheduler's word, or why it can't be asked
    code: int | None = None  # exit code, once the job has ended

    @property
    def final(self) -> bool:
        return self.phase in ("ended", "lost")


class Scheduler(ABC):
    """One kind of place for jobs."""

    program: ClassVar[str] = ""
    """The command-line tool that takes jobs; empty if there is none."""
    poll: ClassVar[float] = 5.0
    """Seconds between two questions while a job is followed."""
    writes_log: ClassVar[bool] = True
    """The job's output is in the log of its launch."""
    gone: ClassVar[tuple[str, ...]] = ()
    """Parts of the error of a cancelled job that has ended already."""

    def check_installed(self) -> None:
        """Raise ``SchedulerError`` if the tool is missing, before anything is written for a job."""
        if self.program and shutil.which(self.program) is None:
            raise _not_installed(self.program)

    @abstractmethod
    def submit(self, job: Job) -> tuple[str, JsonObject]:
        """Submit the script of a job, which is written; return the job's id and other facts that identify it."""

    @abstractmethod
    def states(self, records: Sequence[Record]) -> dict[str, State]:
        """Return the state of each job by id. Raises ``SchedulerError``."""

    @abstractmethod
    def cancel_words(self, record: Record) -> list[str]:
        """Return the command that asks a job to end."""

    def cancel(self, record: Record) -> None:
        """Ask a job to end."""
        ask(*self.cancel_words(record), missing=self.gone)

    def follow_words(self, record: Record) -> list[str]:
        """Return the command that prints the job's output as it comes."""
        return ["tail", "-n", "+1", "-F", str(record.log)]


def ask(*words: str, times: float = 1.0, missing: Sequence[str] = ()) -> str:
    """Return what a scheduler's tool prints within ``times`` the deadline, or nothing if its error contains one of the
    texts ``missing``. Raises ``SchedulerError``."""
    deadline = times * DEADLINE
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=deadline, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise _not_installed(words[0]) from None
    except OSError as error:
        raise SchedulerError(f"{words[0]} can't be started: {error}") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{' '.join(words[:2])} did not answer within {deadline:.0f} s") from None
    if done.returncode != 0:
        text = escape_controls((done.stderr.strip() or done.stdout.strip() or "no message")[-500:])
        if any(part in text for part in missing):
            return ""
        raise SchedulerError(f"{' '.join(words[:2])} failed with exit code {done.returncode}: {text}")
    return done.stdout


def _not_installed(program: str) -> SchedulerError:
    return SchedulerError(f"{program} is not installed here, or not in PATH")
