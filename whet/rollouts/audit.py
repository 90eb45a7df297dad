"""Was each prompt that a run drew trained exactly once, or dropped for a reason? A run's ledger is compared with its
newest checkpoint (which tickets were drawn, have ended, are under way) and with its recorded rollouts (which were
learned from in which step).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.core.types import Status
from whet.metrics.rollout_file import read_rollouts, rollout_steps
from whet.rollouts.ledger import MARKS, UNDER_WAY, UNKNOWN, Entry, expanded, read_ledger


@dataclass(slots=True)
class Audit:
    """What is known of the tickets up to a checkpoint."""

    step: int  # of the checkpoint
    drawn: int  # tickets
    under_way: int  # of them, neither trained nor dropped yet
    unknown: int  # drawn before there was a ledger
    entries: list[Entry] = field(default_factory=list)
    later: int = 0  # lines of steps after the checkpoint, which a resumed run does again
    violations: list[str] = field(default_factory=list)

    def by_epoch(self) -> dict[int | None, Counter[str]]:
        """How many tickets came to which end."""
        found: dict[int | None, Counter[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.epoch, Counter())[entry.outcome] += 1
        return found

    def dropped(self) -> Counter[tuple[str, str]]:
        """How many tickets were dropped, by outcome and reason."""
        return Counter((entry.outcome, entry.why) for entry in self.entries if entry.outcome != "trained")


def audit(folder: Path) -> Audit:
    """Look through a run folder. Raises ``DataError`` where there is nothing to look at."""
    checkpoint = CheckpointStore(folder / "checkpoints", CheckpointConfig(verify=False)).load_latest()
    if checkpoint is None:
        raise DataError(f"{folder} has no checkpoint yet, so nothing says what was drawn: audit it after the first one")
    source: dict[str, Any] = checkpoint.state["source"]
    if "next_ticket" not in source:
        raise DataError(f"{folder} draws no prompts (it learns from rows, or from kept groups), so it has no ledger")
    marks = expanded(source.get("ledger", f"{source['next_ticket']}{UNKNOWN}"))
    entries = list(read_ledger(folder))
    kept = [entry for entry in entries if entry.step <= checkpoint.step]
    pending = {ticket["number"] for ticket in source["pending"]}
    found = Audit(checkpoint.step, len(marks), len(pending), marks.count(UNKNOWN), kept, len(entries) - len(kept))
    found.violations += _once(kept)
    found.violations += _all_known(marks, pending, source, {entry.ticket: entry for entry in kept})
    found.violations += _epochs(kept, source.get("order", {"count": 1})["count"])
    found.violations += _recorded(folder, checkpoint.step, kept)
    return found


def _once(entries: list[Entry]) -> Iterator[str]:
    """No ticket ends twice, and no prompt does in one epoch."""
    met: dict[Any, Entry] = {}
    for entry in entries:
        draws: dict[Any, str] = {entry.ticket: f"ticket {entry.ticket}"}
        if entry.epoch is not None:
            draws[entry.epoch, entry.uid] = f"prompt {entry.uid} of epoch {entry.epoch}"
        for key, name in draws.items():
            before = met.setdefault(key, entry)
            if before is not entry:
                yield f"{name} was {_end(before)} and {_end(entry)}"


def _all_known(marks: str, pending: set[int], source: Mapping[str, Any], ended: Mapping[int, Entry]) -> Iterator[str]:
    """What the checkpoint says of each ticket is what the file says."""
    if len(marks) != source["next_ticket"]:
        yield f"{source['next_ticket']} tickets were drawn, and the checkpoint's ledger has {len(marks)}"
    names = {mark: name for name, mark in MARKS.items()}
    for ticket, mark in enumerate(marks):
        entry = ended.get(ticket)
        if mark in UNDER_WAY and ticket not in pending:
            yield f"ticket {ticket} is lost: neither trained, nor dropped, nor under way in the checkpoint"
        elif mark in UNDER_WAY and entry is not None:
            yield f"ticket {ticket} ({entry.uid}) was {_end(entry)}, and the checkpoint has it under way"
        elif mark not in UNDER_WAY and ticket in pending:
            yield f"ticket {ticket} is {names.get(mark, 'unknown')} and under way in the checkpoint: it counts twice"
        elif mark in names and mark not in UNDER_WAY and (entry is None or entry.outcome != names[mark]):
            said = f"was {_end(entry)}" if entry else "never ended"
            yield f"ticket {ticket} was {names[mark]} by the checkpoint, and {said} by the ledger"
    yield from (f"ticket {ticket} has ended and was never drawn" for ticket in sorted(ended) if ticket >= len(marks))


def _epochs(entries: list[Entry], count: int) -> Iterator[str]:
    """Tickets are drawn epoch by epoch, ``count`` in each; as no prompt ends twice in one, a full epoch has all."""
    for entry in entries:
        if entry.epoch not in (None, entry.ticket // count):
            yield f"ticket {entry.ticket} is of epoch {entry.ticket // count}, not {entry.epoch}"


def _end(entry: Entry) -> str:
    return f"{entry.outcome} in step {entry.step}"


def _recorded(folder: Path, last: int, entries: list[Entry]) -> Iterator[str]:
    """The rollouts of a step are those of the tickets that it trained."""
    trained: dict[int, set[str]] = {}
    for entry in entries:
        if entry.outcome == "trained":
            trained.setdefault(entry.step, set()).add(f"{entry.ticket:07d}:{entry.uid}")
    for step in rollout_steps(folder):
        if step > last or not entries or step < entries[0].step:
            continue
        recorded = {record.uid for record in read_rollouts(folder, step) if record.status != Status.FAILED}
        for uid in sorted(recorded ^ trained.get(step, set())):
            said = "the ledger" if uid in recorded else "its rollouts"
            yield f"{uid} was learned from in step {step}, of which {said} know{'s' * (said == 'the ledger')} nothing"
