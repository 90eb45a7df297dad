"""An attached job: its output is printed as it comes, until the job has ended."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from whet.base.errors import WhetError
from whet.launch.job import Record
from whet.launch.scheduler import Scheduler, State
from whet.launch.schedulers import SCHEDULERS
from whet.launch.submit import states

_PATIENCE = 600.0  # seconds for which a scheduler may fail to answer
_OUTPUT_DEADLINE = 20.0  # seconds for the end of the output after the end of the job


def follow(record: Record, output: BinaryIO, say: Callable[[str], object]) -> State:
    """Copy a job's output to ``output`` until the job has ended, and return its last state. ``say`` gets a line when
    the state changes. Raises ``WhetError`` if the scheduler gives no answer for ten minutes."""
    scheduler = SCHEDULERS[record.kind]
    with (_log_file if scheduler.writes_log else _printed)(record, scheduler, output) as copy:
        last, answered, asked = None, time.monotonic(), 0.0
        while True:
            copy(False)
            if time.monotonic() - asked >= scheduler.poll:
                state, asked = states([record])[record], time.monotonic()
                if state.phase != "unknown":
                    answered = asked
                elif asked - answered > _PATIENCE:
                    raise WhetError(f"job {record.id} can't be followed: {state.detail}. It may still run: whet runs")
                if (state.phase, state.detail) != last:
                    last = (state.phase, state.detail)
                    say(f"job {record.id}: {state.phase}{f' ({state.detail})' if state.detail else ''}")
                if state.final:
                    copy(True)
                    return state
            time.sleep(min(0.2, scheduler.poll))


@contextmanager
def _log_file(record: Record, scheduler: Scheduler, output: BinaryIO) -> Iterator[Callable[[bool], None]]:
    """Yield a function that copies the new part of the job's log. A shared file system may show it late."""
    position = 0

    def copy(last: bool) -> None:
        nonlocal position
        if record.log.is_file():
            with record.log.open("rb") as log:
                log.seek(position)
                part = log.read()
            position += len(part)
            output.write(part)
            output.flush()

    yield copy


@contextmanager
def _printed(record: Record, scheduler: Scheduler, output: BinaryIO) -> Iterator[Callable[[bool], None]]:
    """Yield a function that keeps the scheduler's own command for logs running: it fails while the job is queued, and
    ends when a job is moved to another machine."""
    process: subprocess.Popen[bytes] | None = None
    begun, ended = 0.0, False

    def copy(last: bool) -> None:
        nonlocal process, begun, ended
        if process is not None and process.poll() is not None:
            ended = process.returncode == 0
            process = None
        if process is None and not ended and (last or time.monotonic() - begun > scheduler.poll):
            begun = time.monotonic()
            words = scheduler.follow_words(record)
            errors = subprocess.STDOUT if words[0] == "docker" else subprocess.DEVNULL  # of the job, or of the tool
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        if last and process is not None:
            try:
                process.wait(_OUTPUT_DEADLINE)
            except subprocess.TimeoutExpired:
                process.terminate()

    try:
        yield copy
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
