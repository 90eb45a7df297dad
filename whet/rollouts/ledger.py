"""The ledger: the state of each prompt that was drawn: in flight, trained in a step, or dropped and why. Each draw, a
*ticket*, ends once; a second end raises an error. The ends of a step are appended to ``ledger.jsonl`` before the
checkpoint that includes them; a checkpoint holds one mark per ticket. ``audit.py`` compares the two."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

from whet.base.errors import DataError, WhetError
from whet.base.files import append
from whet.config.typed import check_types
from whet.metrics.sinks.jsonl import read_lines

log = logging.getLogger(__name__)

FILE = "ledger.jsonl"  # in the run folder

Outcome = Literal["trained", "filtered", "failed"]
MARKS = {"dispatched": "d", "finished": "g", "trained": "t", "filtered": "f", "failed": "x"}
IN_FLIGHT = MARKS["dispatched"] + MARKS["finished"]
UNKNOWN = "?"  # in checkpoints of versions without a ledger


@dataclass(frozen=True, slots=True)
class Entry:
    """The end of one ticket: a line of the file."""

    step: int  # the step that trained on it, or for which it was sampled
    ticket: int  # number of the draw in this run, from 0
    epoch: int | None  # None with a curriculum, which draws with repetition
    uid: str  # the task's
    version: int  # version of the weights when it was started
    outcome: Outcome
    why: str = ""  # the filter that dropped it, or the last error


class Ledger:
    """The marks of all tickets so far, and the ends that are not yet written to the file.

    >>> ledger = Ledger()
    >>> ledger.dispatched(0); ledger.dispatched(1); ledger.ended(Entry(1, 0, 0, "a", 0, "trained"))
    >>> ledger.state()
    '1t1d'
    """

    def __init__(self) -> None:
        self.marks = bytearray()
        self._unwritten: list[Entry] = []

    def dispatched(self, ticket: int) -> None:
        """Record a new ticket. Ticket numbers are consecutive."""
        if ticket != len(self.marks):
            raise WhetError(
                f"ticket {ticket} was drawn, but {len(self.marks)} comes next: a prompt was lost or drawn twice"
            )
        self.marks += MARKS["dispatched"].encode()

    def finished(self, ticket: int) -> None:
        """Record that a ticket's group is sampled and graded."""
        self._mark(ticket, "finished")

    def ended(self, entry: Entry) -> None:
        """Record a ticket's end. Raises ``WhetError`` if it has ended before, or was never drawn."""
        self._mark(entry.ticket, entry.outcome)
        self._unwritten.append(entry)

    def _mark(self, ticket: int, mark: str) -> None:
        if not 0 <= ticket < len(self.marks) or chr(self.marks[ticket]) not in IN_FLIGHT:
            raise WhetError(f"ticket {ticket} can't be {mark}: it is not in flight, so it would count twice")
        self.marks[ticket] = ord(MARKS[mark])

    def write(self, folder: Path) -> None:
        """Append the ends since the last call to the run folder's file."""
        entries, self._unwritten = self._unwritten, []
        append(folder / FILE, "".join(json.dumps(asdict(entry)) + "\n" for entry in entries))

    def compare(self, folder: Path) -> None:
        """Warn if the run folder's file was cut or lost. After a resume it must have all ends up to the checkpoint."""
        ended = sum(chr(mark) not in IN_FLIGHT + UNKNOWN for mark in self.marks)
        listed = sum(1 for _ in read_ledger(folder))
        if listed != ended:
            log.warning(
                "%s lists the ends of %d prompts, but the checkpoint %d: the file was cut, changed or lost, and "
                "`whet audit` will report it as incomplete. The run continues anyway",
                folder / FILE, listed, ended,
            )  # fmt: skip

    def state(self) -> str:
        """Return the marks in run-length encoding: ``120t1f8t2d`` is 120 trained, one filtered, eight trained, two
        dispatched."""
        return "".join(f"{len(list(run))}{mark}" for mark, run in groupby(self.marks.decode()))

    def load_state(self, state: str) -> None:
        self.marks, self._unwritten = bytearray(expanded(state).encode()), []


def expanded(state: str) -> str:
    """Return one mark per ticket.

    >>> expanded("2t1d")
    'ttd'
    """
    return "".join(mark * int(count) for count, mark in re.findall(r"(\d+)(\D)", state))


def read_ledger(folder: Path) -> Iterator[Entry]:
    """Yield the lines of a run's file. Raises ``DataError`` for a broken line; a torn last line is skipped."""
    for number, _, line in read_lines(folder / FILE, partial(check_types, Entry)):
        try:
            yield Entry(**line)
        except TypeError as error:
            raise DataError(f"{folder / FILE}:{number}: not a line of a ledger: {error}") from error
