"""The split of rows or tasks into training and test items, and the count of dropped rows with the reasons."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from whet.base.errors import DataError

log = logging.getLogger(__name__)

T = TypeVar("T")
Key = Callable[[T], int]  # a hash; items with equal keys are never in both splits


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
        """Log the counts. Raises ``DataError`` if they don't add up to ``kept``, or ``kept`` is 0."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        account = f"{self.name}: {self.rows} rows, {kept} kept" + (f", dropped: {reasons}" if reasons else "")
        if lost := self.rows - kept - self.dropped.total():
            raise DataError(f"{account}: {lost} rows are unaccounted for")
        if not kept:
            raise DataError(f"{account}: no row is left")
        log.info(account)


def hold_out(
    train: Sequence[T], test: Sequence[T] | None, size: int, key: Key[T], tally: Tally
) -> tuple[list[T], list[T]]:
    """Return (train, test) without a common key. With ``test`` None, up to ``size`` rows of ``train`` are held out:
    rows with the smallest keys, so that reordering changes nothing and added rows change little. Otherwise the test
    split is the first ``size`` of ``test``, and rows of ``train`` with a key of ``test`` are dropped."""
    keys = [key(row) for row in train]
    if test is None:
        test_keys = _smallest(keys, size)
        kept = [row for row, row_key in zip(train, keys, strict=True) if row_key in test_keys]
    else:
        test_keys = {key(row) for row in test}
        kept = list(test[:size])
        tally.drop("also in the test split", sum(row_key in test_keys for row_key in keys))
        tally.drop("beyond test_size", len(test) - len(kept))
    return [row for row, row_key in zip(train, keys, strict=True) if row_key not in test_keys], kept


def distinct(rows: Iterable[T], key: Key[T], tally: Tally, apart_from: Iterable[T] = ()) -> list[T]:
    """Return the first row of each key, without rows whose key is in ``apart_from``."""
    test_keys, seen = {key(row) for row in apart_from}, dict[int, T]()
    for row in rows:
        if (row_key := key(row)) in test_keys:
            tally.drop("also in the test split")
        elif row_key in seen:
            tally.drop("duplicate question")
        else:
            seen[row_key] = row
    return list(seen.values())


def _smallest(keys: Collection[int], count: int) -> set[int]:
    """Return the smallest keys that at most ``count`` rows have."""
    chosen: set[int] = set()
    room = count
    for key, rows in sorted(Counter(keys).items()):
        if rows <= room:
            chosen.add(key)
            room -= rows
    return chosen
