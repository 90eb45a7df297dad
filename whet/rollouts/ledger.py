"""What became of each prompt that was drawn: under way, trained in a step, or dropped and why. Each draw, a *ticket*,
ends once; a second end is an error on the spot. The ends are appended to ``ledger.jsonl`` step by step, before the
checkpoint that stands for them; a checkpoint holds one mark for each ticket. ``audit.py`` compares the two.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from whet.base.errors import DataError, WhetError
from whet.base.files import append
from whet.metrics.sinks.jsonl import read_lines

log = logging.getLogger(__name__)

FILE = "ledger.jsonl"  # in the run folder

Outcome = Literal["trained", "filtered", "failed"]
MARKS = {"dispatched": "d", "finished": "g", "trained": "t", "filtered": "f", "failed": "x"}
UNDER_WAY = MARKS["dispatched"] + MARKS["finished"]
UNKNOWN = "?"  # of checkpoints that were made before there was a ledger


@dataclass(frozen=True, slots=True)
class Entry:
    """The end of one ticket: a line of the file."""

    step: int  # the step that learned from it, or in whose place it was sampled
    ticket: int  # which draw of the run, from 0
    epoch: int | None  # None with a curriculum, which draws with repetition: there (uid, ticket) is a draw
    uid: str  # the task's
    version: int  # weights under which it was started
    outcome: Outcome
    why: str = ""  # the filter that dropped it, or the last error


class Ledger:
    """The marks of all tickets so far, and the ends that are not written yet.

    >>> ledger = Ledger()
    >>> ledger.dispatched(0); ledger.dispatched(1); ledger.ended(Entry(1, 0, 0, "a", 0, "trained"))
    >>> ledger.state()
    '1t1d'
    """

    def __init__(self) -> None:
        self.marks = bytearray()
        self._news: list[Entry] = []

    def dispatched(self, ticket: int) -> None:
        """Ticket numbers are consecutive."""
        if ticket != len(self.marks):
            raise WhetError(
                f"ticket {ticket} was drawn, but {len(self.marks)} comes next: a prompt was lost or doubled"
            )
        self.marks += MARKS["dispatched"].encode()

    def finished(self, ticket: int) -> None:
        """Its group is sampled and graded."""
        self._mark(ticket, "finished")

    def ended(self, entry: Entry) -> None:
        """Raises ``WhetError`` for a ticket that has ended, or was never drawn."""
        self._mark(entry.ticket, entry.outcome)
        self._news.append(entry)

    def _mark(self, ticket: int, mark: str) -> None:
        if not 0 <= ticket < len(self.marks) or chr(self.marks[ticket]) not in UNDER_WAY:
            raise WhetError(f"ticket {ticket} can't be {mark}: it is not under way, so it would count twice")
        self.marks[ticket] = ord(MARKS[mark])

    def write(self, folder: Path) -> None:
        """Append what has ended since the last call to the run folder's file."""
        news, self._news = self._news, []
        append(folder / FILE, "".join(json.dumps(asdict(entry)) + "\n" for entry in news))

    def compare(self, folder: Path) -> None:
        """Warn where the run folder's file was cut or lost: after a resume, it tells all ends up to the checkpoint."""
        ended = sum(chr(mark) not in UNDER_WAY + UNKNOWN for mark in self.marks)
        told = sum(1 for _ in read_ledger(folder))
        if told != ended:
            log.warning(
                "%s tells what became of %d prompts, and the checkpoint of %d: the file was cut, changed or lost, and "
                "`whet audit` will find it incomplete. The run goes on all the same",
                folder / FILE, told, ended,
            )  # fmt: skip

    def state(self) -> str:
        """The marks, run by run: ``120t1f8t2d`` are 120 trained, one filtered, eight trained, two dispatched."""
        return "".join(f"{len(list(run))}{mark}" for mark, run in groupby(self.marks.decode()))

    def load_state(self, state: str) -> None:
        self.marks, self._news = bytearray(expanded(state).encode()), []


def expanded(state: str) -> str:
    """One mark for each ticket.

    >>> expanded("2t1d")
    'ttd'
    """
    return "".join(mark * int(count) for count, mark in re.findall(r"(\d+)(\D)", state))


def read_ledger(folder: Path) -> Iterator[Entry]:
    """The lines of a run's file. Raises ``DataError`` for a broken one; a torn last line is skipped."""
    for number, (_, line) in enumerate(read_lines(folder / FILE), 1):
        try:
            yield Entry(**line)
        except TypeError as error:
            raise DataError(f"{folder / FILE}:{number}: not a line of a ledger: {error}") from error
