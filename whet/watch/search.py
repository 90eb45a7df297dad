"""Rollouts of a run folder, found and paged on disk: nothing is held in memory but the page that is returned.

A place is a step and an offset in its file. Without a step, the newest files are searched first, for a bounded time;
the answer says where to continue.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic_core import from_json

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.core.content import words_of
from whet.metrics.rollout_file import RolloutRecord, rollout_path
from whet.metrics.rollout_images import restoring
from whet.show.rollouts import card, episode, head
from whet.show.view import ORDERS, verdict

PAGE = 20  # rollouts of an answer
SECONDS = 2.0  # of a search
_LONGEST = 64 << 20  # bytes of a line, and of a file that is sorted or searched for an episode
_DAMAGED = 3  # damaged lines that are named

Sort = Literal["", "reward", "advantage", "length", "mismatch"]
Place = tuple[int, int]  # step, offset in its file; of a sorted list: step, rank


@dataclass(frozen=True, slots=True)
class Query:
    """The wanted rollouts. Empty strings and None find everything; ``low`` and ``high`` bound the reward."""

    step: int | None = None
    verdict: Literal["", "correct", "wrong"] = ""
    status: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    sort: Sort = ""  # needs a step

    def matches(self, record: RolloutRecord) -> bool:
        """Return whether a rollout is wanted."""
        if (self.verdict and verdict(record) != self.verdict) or (self.status and record.status != self.status):
            return False
        if self.low is not None and (record.reward is None or record.reward < self.low):
            return False
        if self.high is not None and (record.reward is None or record.reward > self.high):
            return False
        return not self.text or any(self.text.casefold() in text.casefold() for text in _texts(record))

    def may_match(self, line: bytes) -> bool:
        """Return False for a line that can't contain the text, without decoding it."""
        plain = self.text.isascii() and self.text.isprintable() and not set(self.text) & set('"\\')
        return not (self.text and plain) or self.text.lower().encode() in line.lower()


def search(run: Path, steps: Sequence[int], query: Query, start: Place | None = None) -> JsonObject:
    """Return a page of heads with their places (``rollouts``), the place to continue at or None (``next``), and a
    ``note`` for people. ``steps``: the recorded steps, in order. Raises ``DataError`` for an impossible query."""
    if query.sort:
        return _sorted(run, query, start)
    chosen = [query.step] if query.step is not None else [s for s in reversed(steps) if start is None or s <= start[0]]
    until, heads, damaged = time.monotonic() + SECONDS, list[dict[str, Any]](), list[str]()
    for step in chosen:
        for offset, line in _lines(run, step, start[1] if start and start[0] == step else 0):
            if len(heads) == PAGE or time.monotonic() > until:
                note = "" if len(heads) == PAGE else f"searched back to step {step}"
                return _answer(heads, (step, offset), damaged, note)
            if query.may_match(line):
                record = _decode(line, rollout_path(run, step), offset, damaged)
                if record is not None and query.matches(record):
                    heads.append(head(record) | {"at": f"{step}:{offset}"})
    return _answer(heads, None, damaged)


def whole_episode(run: Path, place: Place) -> dict[str, object]:
    """Return the cards of all branches of the episode at a place, and which of them is there. Raises ``DataError`` if
    no rollout begins there."""
    step, at = place
    lines = dict(_lines(run, step, 0, _LONGEST))
    record = _decode(lines[at], rollout_path(run, step), at, []) if at in lines else None
    if record is None:
        raise DataError(f"no rollout begins at byte {at} of {rollout_path(run, step).name}")
    branches, restored = [record], restoring(rollout_path(run, step).parent)
    if record.uid:
        same = f'"{record.uid}"'.encode("utf-8", "replace")
        decoded = (
            record if offset == at else _decode(line, run, offset, [])
            for offset, line in lines.items()
            if same in line or offset == at
        )
        branches = [branch for branch in decoded if branch and episode(branch) == episode(record)]
    return {
        "cards": [card(replace(branch, messages=restored(branch.messages))) for branch in branches],
        "chosen": next(i for i, b in enumerate(branches) if b is record),
    }


def _sorted(run: Path, query: Query, start: Place | None) -> dict[str, object]:
    if query.step is None:
        raise DataError("choose a step to sort its rollouts")
    damaged: list[str] = []
    heads: list[tuple[float, JsonObject]] = []
    for offset, line in _lines(run, query.step, 0, _LONGEST):
        if not query.may_match(line):
            continue
        record = _decode(line, rollout_path(run, query.step), offset, damaged)
        if record is not None and query.matches(record):
            value = ORDERS[query.sort](record)
            heads.append((float("-inf") if value is None else value, head(record) | {"at": f"{query.step}:{offset}"}))
    heads.sort(key=lambda pair: -pair[0])
    first = start[1] if start else 0
    end = (query.step, first + PAGE) if first + PAGE < len(heads) else None
    return _answer([line for _, line in heads[first : first + PAGE]], end, damaged)


def _answer(heads: list[JsonObject], end: Place | None, damaged: list[str], note: str = "") -> dict[str, object]:
    if damaged:
        note = "; ".join([*filter(None, [note]), f"damaged lines left out: {', '.join(damaged[:_DAMAGED])}"])
    return {"rollouts": heads, "next": None if end is None else f"{end[0]}:{end[1]}", "note": note}


def _lines(run: Path, step: int, offset: int, most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of a step's file; nothing if it is missing. Raises ``DataError`` for an offset within a
    line, or a file larger than ``most`` bytes."""
    path = rollout_path(run, step)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if most is not None and path.stat().st_size > most:
            raise DataError(f"{path.name} is larger than {most >> 20} MB; search it without a sort instead")
        _check_start(file, path, offset)
        while line := file.readline(_LONGEST):
            yield offset, line
            offset += len(line)


def _check_start(file: BinaryIO, path: Path, offset: int) -> None:
    inside = 0 <= offset <= file.seek(0, SEEK_END)
    file.seek(max(0, offset - 1) if inside else 0)
    if offset and (not inside or file.read(1) != b"\n"):
        raise DataError(f"no rollout begins at byte {offset} of {path.name}")


def _decode(line: bytes, path: Path, offset: int, damaged: list[str]) -> RolloutRecord | None:
    """Return the rollout of a line; None for a damaged one, which is added to the list."""
    try:
        try:
            values = from_json(line)
        except ValueError:  # of a lone surrogate, which only the slower parser reads
            values = json.loads(line)
        record = RolloutRecord.from_json(values)
        head(record)  # a value of a wrong type shows here
        return record
    except (ValueError, TypeError, AttributeError, KeyError, IndexError):
        damaged.append(f"{path.name} at byte {offset}")
        return None


def _texts(record: RolloutRecord) -> Iterator[str]:
    yield from (record.task, record.prompt, record.answer, record.error or "", *record.data.values())
    yield from (words_of(message["content"]) for message in record.messages)
