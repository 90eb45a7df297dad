"""The split into what is trained on and what is held out, for rows and tasks alike, and the account of what was left
out."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from whet.base.errors import DataError

log = logging.getLogger(__name__)

T = TypeVar("T")
Key = Callable[[T], int]  # a hash; what has the same one is never in both splits


@dataclass(slots=True)
class Tally:
    """Rows in = rows kept + rows dropped, with the reasons."""

    name: str
    rows: int
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] += count

    def report(self, kept: int) -> None:
        """Log the account. Raises ``DataError`` when it doesn't add up to ``kept`` or nothing is left."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        account = f"{self.name}: {self.rows} rows, {kept} kept" + (f", dropped: {reasons}" if reasons else "")
        if lost := self.rows - kept - self.dropped.total():
            raise DataError(f"{account}: {lost} rows are unaccounted for")
        if not kept:
            raise DataError(f"{account}: nothing is left")
        log.info(account)


def hold_out(
    train: Sequence[T], test: Sequence[T] | None, size: int, key: Key[T], tally: Tally
) -> tuple[list[T], list[T]]:
    """(train, test) without a key in common. ``test`` None: at most ``size`` of ``train`` are held out, those with the
    smallest keys, so that the choice survives reordering and added rows change little; otherwise the first ``size`` of
    ``test``, and what ``train`` has in common with any of it is dropped."""
    keys = [key(row) for row in train]
    if test is None:
        held = _smallest(keys, size)
        kept = [row for row, own in zip(train, keys, strict=True) if own in held]
    else:
        held = {key(row) for row in test}
        kept = list(test[:size])
        tally.drop("also in the test split", sum(own in held for own in keys))
        tally.drop("beyond test_size", len(test) - len(kept))
    return [row for row, own in zip(train, keys, strict=True) if own not in held], kept


def distinct(rows: Iterable[T], key: Key[T], tally: Tally, apart_from: Iterable[T] = ()) -> list[T]:
    """The rows whose key comes up for the first time, and not in ``apart_from``."""
    held, seen = {key(row) for row in apart_from}, dict[int, T]()
    for row in rows:
        if (own := key(row)) in held:
            tally.drop("also in the test split")
        elif own in seen:
            tally.drop("duplicate question")
        else:
            seen[own] = row
    return list(seen.values())


def _smallest(keys: Collection[int], count: int) -> set[int]:
    """Return the smallest keys, of at most ``count`` rows together."""
    chosen: set[int] = set()
    room = count
    for key, rows in sorted(Counter(keys).items()):
        if rows <= room:
            chosen.add(key)
            room -= rows
    return chosen
