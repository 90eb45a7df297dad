"""Checks of a run folder: was each prompt that the run drew trained exactly once, or dropped for a reason? The ledger
is compared with the newest checkpoint (which tickets were drawn, have ended or are in flight) and with the recorded
rollouts (which were trained on in which step)."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.core.types import Status
from whet.metrics.rollout_file import read_rollouts, rollout_steps
from whet.rollouts.ledger import IN_FLIGHT, MARKS, UNKNOWN, Entry, expanded, read_ledger


@dataclass(slots=True)
class Audit:
    """The state of all tickets up to a checkpoint."""

    step: int  # of the checkpoint
    drawn: int  # tickets
    in_flight: int  # tickets that are neither trained nor dropped yet
    unknown: int  # tickets drawn by a version without a ledger
    entries: list[Entry] = field(default_factory=list)
    later: int = 0  # lines of steps after the checkpoint, which a resumed run repeats
    violations: list[str] = field(default_factory=list)

    def by_epoch(self) -> dict[int | None, Counter[str]]:
        """Return the number of tickets by outcome, for each epoch."""
        counts: dict[int | None, Counter[str]] = {}
        for entry in self.entries:
            counts.setdefault(entry.epoch, Counter())[entry.outcome] += 1
        return counts

    def dropped(self) -> Counter[tuple[str, str]]:
        """Return the number of dropped tickets by outcome and reason."""
        return Counter((entry.outcome, entry.why) for entry in self.entries if entry.outcome != "trained")


def audit(folder: Path) -> Audit:
    """Audit a run folder. Raises ``DataError`` if it has no checkpoint or no ledger."""
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(verify=False))
    if store.latest() is None:
        raise DataError(f"{folder} has no checkpoint yet, which the audit needs; audit it after the first checkpoint")
    checkpoint = store.read(lambda checkpoint: checkpoint, "latest")
    source: JsonObject = checkpoint.state["source"]
    if "next_ticket" not in source:
        raise DataError(f"{folder} draws no prompts (it trains on rows or replays kept groups), so it has no ledger")
    marks = expanded(source.get("ledger", f"{source['next_ticket']}{UNKNOWN}"))
    entries = list(read_ledger(folder))
    kept = [entry for entry in entries if entry.step <= checkpoint.step]
    pending = {ticket["number"] for ticket in source["pending"]}
    result = Audit(checkpoint.step, len(marks), len(pending), marks.count(UNKNOWN), kept, len(entries) - len(kept))
    result.violations += _once(kept)
    result.violations += _compare_marks(marks, pending, source, {entry.ticket: entry for entry in kept})
    result.violations += _epochs(kept, source.get("order", {"count": 1})["count"])
    result.violations += _recorded(folder, checkpoint.step, kept)
    return result


def _once(entries: list[Entry]) -> Iterator[str]:
    """Yield each ticket that ended twice, and each prompt that ended twice in one epoch."""
    met: dict[Any, Entry] = {}
    for entry in entries:
        draws: dict[Any, str] = {entry.ticket: f"ticket {entry.ticket}"}
        if entry.epoch is not None:
            draws[entry.epoch, entry.uid] = f"prompt {entry.uid} of epoch {entry.epoch}"
        for key, name in draws.items():
            before = met.setdefault(key, entry)
            if before is not entry:
                yield f"{name} was {_end(before)} and {_end(entry)}"


def _compare_marks(
    marks: str, pending: set[int], source: Mapping[str, object], ended: Mapping[int, Entry]
) -> Iterator[str]:
    """Yield each ticket whose state in the checkpoint differs from the ledger file."""
    if len(marks) != source["next_ticket"]:
        yield f"{source['next_ticket']} tickets were drawn, but the checkpoint's ledger has {len(marks)}"
    names = {mark: name for name, mark in MARKS.items()}
    for ticket, mark in enumerate(marks):
        entry = ended.get(ticket)
        if mark in IN_FLIGHT and ticket not in pending:
            yield f"ticket {ticket} is lost: neither trained, nor dropped, nor in flight in the checkpoint"
        elif mark in IN_FLIGHT and entry is not None:
            yield f"ticket {ticket} ({entry.uid}) was {_end(entry)}, but is in flight in the checkpoint"
        elif mark not in IN_FLIGHT and ticket in pending:
            yield f"ticket {ticket} is {names.get(mark, 'unknown')} and in flight in the checkpoint, so it counts twice"
        elif mark in names and mark not in IN_FLIGHT and (entry is None or entry.outcome != names[mark]):
            in_ledger = f"was {_end(entry)}" if entry else "never ended"
            yield f"ticket {ticket} was {names[mark]} in the checkpoint, but {in_ledger} in the ledger"
    yield from (f"ticket {ticket} has ended but was never drawn" for ticket in sorted(ended) if ticket >= len(marks))


def _epochs(entries: list[Entry], count: int) -> Iterator[str]:
    """Yield each ticket of the wrong epoch. Tickets are drawn epoch by epoch, ``count`` in each; as no prompt ends
    twice in an epoch, a full epoch has all of them."""
    for entry in entries:
        if entry.epoch not in (None, entry.ticket // count):
            yield f"ticket {entry.ticket} is of epoch {entry.ticket // count}, not {entry.epoch}"


def _end(entry: Entry) -> str:
    return f"{entry.outcome} in step {entry.step}"


def _recorded(folder: Path, last: int, entries: list[Entry]) -> Iterator[str]:
    """Yield each difference between a step's recorded rollouts and the tickets that it trained."""
    trained: dict[int, set[str]] = {}
    for entry in entries:
        if entry.outcome == "trained":
            trained.setdefault(entry.step, set()).add(f"{entry.ticket:07d}:{entry.uid}")
    for step in rollout_steps(folder):
        if step > last or not entries or step < entries[0].step:
            continue
        recorded = {record.uid for record in read_rollouts(folder, step) if record.status != Status.FAILED}
        for uid in sorted(recorded ^ trained.get(step, set())):
            present, absent = ("rollouts", "ledger doesn't") if uid in recorded else ("ledger", "rollouts don't")
            yield f"{uid} was trained on in step {step} according to the {present}, but the {absent} list it"
