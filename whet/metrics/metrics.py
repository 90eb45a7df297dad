"""Mergeable metrics. Each name stores enough (sum and count, minimum, maximum) to be merged exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Self

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch

Kind = Literal["mean", "sum", "min", "max"]


@dataclass(slots=True)
class _Cell:
    kind: Kind
    value: float
    count: float = 1.0


class Metrics:
    """A set of named numbers that merges without bias.

    >>> a = Metrics().mean("loss", 6.0, 3).max("ratio", 1.5)
    >>> b = Metrics().mean("loss", 2.0, 1).max("ratio", 1.2)
    >>> a.merge(b).result()
    {'loss': 2.0, 'ratio': 1.5}
    """

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        self._later: list[tuple[Tensor, Callable[..., Metrics]]] = []

    def __contains__(self, name: str) -> bool:
        """Return whether there is a number of this name, apart from those still on a device."""
        return name in self._cells

    def mean(self, name: str, total: float, count: float = 1.0) -> Self:
        """Add to a mean, given as its sum and count. With count 0 nothing is recorded."""
        return self._put(name, "mean", float(total), float(count)) if count else self

    def sum(self, name: str, value: float) -> Self:
        """Add to a count or total."""
        return self._put(name, "sum", float(value))

    def min(self, name: str, value: float) -> Self:
        """Record a value; the smallest one is kept, or nan."""
        return self._put(name, "min", float(value))

    def max(self, name: str, value: float) -> Self:
        """Record a value; the largest one is kept, or nan."""
        return self._put(name, "max", float(value))

    def later(self, numbers: Tensor, record: Callable[..., Metrics]) -> Self:
        """Add ``record(*numbers)``, [n]. Numbers on a device are added when they are read, to avoid a wait for it."""
        if numbers.device.type == "cpu":
            return self.merge(record(*numbers.tolist()))
        self._later.append((numbers.detach().double(), record))
        return self

    def read(self) -> Self:
        """Copy all pending numbers from the device in one transfer, and record them."""
        if waiting := self._later:
            self._later = []
            fetched = iter(torch.cat([numbers for numbers, _ in waiting]).tolist())
            for numbers, record in waiting:
                self.merge(record(*islice(fetched, len(numbers))))
        return self

    def merge(self, other: Metrics, prefix: str = "") -> Self:
        """Add ``other``, its names prefixed with ``prefix``; measures of time stay below ``time/``. Raises
        ``DataError`` if a name has different kinds."""
        if prefix:
            other.read()
        self._later += other._later
        for name, cell in other._cells.items():
            time = "time/" if prefix and name.startswith("time/") else ""
            self._put(f"{time}{prefix}{name.removeprefix(time)}", cell.kind, cell.value, cell.count)
        return self

    def join(self, other: Metrics) -> Self:
        """Add ``other``, whose names must all be new. Raises ``DataError`` for a name that is here already: the two
        numbers would be averaged, though they measure different things."""
        if twice := self.result().keys() & other.result().keys():
            raise DataError(
                f"the metric {min(twice)!r} is whet's own, and a loss or an algorithm of yours records another number "
                "under this name: choose another name"
            )
        return self.merge(other)

    def result(self) -> dict[str, float]:
        """Return the numbers by name, in the order in which the names first appeared."""
        self.read()
        return {n: c.value / c.count if c.kind == "mean" else c.value for n, c in self._cells.items()}

    def _put(self, name: str, kind: Kind, value: float, count: float = 1.0) -> Self:
        if not isinstance(name, str):
            raise DataError(f"the name of a metric must be a text, not {name!r}")
        old = self._cells.get(name)
        if old is None:
            self._cells[name] = _Cell(kind, value, count)
        elif old.kind != kind:
            raise DataError(
                f"the metric {name!r} is recorded once as {old.kind} and once as {kind}: record it in one way, "
                "or under two names"
            )
        elif kind in ("mean", "sum"):
            old.value, old.count = old.value + value, old.count + count
        elif math.isnan(value) or math.isnan(old.value):
            old.value = math.nan
        else:
            old.value = min(old.value, value) if kind == "min" else max(old.value, value)
        return self
