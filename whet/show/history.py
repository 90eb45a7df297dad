"""The metrics of a run in columns, read from ``metrics.jsonl`` as the run writes it.

A run of 100,000 steps with 50 metrics takes 40 MB. Only complete lines are read; a file that was cut or replaced, as a
resumed run does, is read from the beginning.
"""

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import lt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from whet.base.strict_json import JsonObject
from whet.metrics.sinks.jsonl import FILE, RESERVED

_CHUNK = 8 << 20  # bytes read at once
_MOST_NAMES = 2000  # metrics of a run; further ones are ignored
_DAMAGED = 5  # damaged lines whose numbers are kept

Floats = NDArray[np.float64]


class Table:
    """Numbers by step and name, in order of steps. A missing number is nan, one that was not finite is infinite."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps, [N]."""
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> Floats:
        """Return the numbers of a metric, [N]; all nan for an unknown name."""
        values = self._columns.get(name, array("d"))
        return np.concatenate([np.array(values), np.full(len(self) - len(values), np.nan)])

    def extend(self, lines: Iterable[JsonObject]) -> None:
        """Add lines. Later values of a step replace earlier ones."""
        for names, group in groupby(lines, key=tuple):  # nearly all lines have the same names: a column at a time
            same = list(group)
            steps = [line["step"] for line in same]
            row = len(self._steps)
            if all(map(lt, [self._steps[-1] if row else -(2**62), *steps[:-1]], steps)):
                self._steps.extend(steps)
                for name, values in zip(names, zip(*(line.values() for line in same), strict=True), strict=True):
                    self._append(name, row, values)
            else:
                for line in same:
                    self._set(line)

    def _append(self, name: str, row: int, values: Sequence[Any]) -> None:
        """Write the numbers of a metric from a row on."""
        if name in RESERVED or all(isinstance(value, str) for value in values):
            return
        if name not in self._columns and len(self._columns) >= _MOST_NAMES:
            return
        column = self._columns.setdefault(name, array("d"))
        column.extend([math.nan] * (row - len(column)))
        try:
            column.extend(values)
        except (TypeError, OverflowError):  # of a number that was not finite, written as null, or a text
            del column[row:]
            column.extend(map(_number, values))

    def _set(self, line: JsonObject) -> None:
        """Write a line over the one of its step, or insert it."""
        row = bisect_left(self._steps, line["step"])
        if row == len(self._steps) or self._steps[row] != line["step"]:
            self._steps.insert(row, line["step"])
            for column in self._columns.values():
                if row < len(column):
                    column.insert(row, math.nan)
        for name, value in line.items():
            later = self._columns.get(name, array("d"))[row + 1 :]
            if name in self._columns:
                del self._columns[name][row:]
            self._append(name, row, [value])
            if later:
                self._columns[name].extend(later)


def _number(value: object) -> float:
    if value is None:
        return math.inf
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


class History:
    """All metrics of a run folder so far. ``refresh`` reads what was added."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._reset()

    def _reset(self) -> None:
        self.train = Table()
        self.evaluations: list[JsonObject] = []  # in order, one for each step
        self.reported: JsonObject = {}  # the values named run/...
        self.damaged: list[int] = []  # numbers of the first damaged lines
        self.damaged_lines = 0
        self._offset = self._lines = 0
        self._inode: int | None = None

    @property
    def share(self) -> float:
        """The share of the file that was read."""
        try:
            return min(1.0, self._offset / (self.path.stat().st_size or 1))
        except OSError:
            return 1.0

    def refresh(self) -> bool:
        """Read at most 8 MB of new lines and return whether there were any. Raises ``OSError`` if the file can't be
        read; a missing file has no lines."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._reset()
                self._inode = state.st_ino
            file.seek(self._offset)
            data = file.read(_CHUNK)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _CHUNK:  # no line is this long
            self._note_damage()
            end = len(data)
        self._offset += end
        train: list[JsonObject] = []
        for text in data[:end].split(b"\n")[:-1]:
            self._lines += 1
            try:
                line = from_json(text)
                step, kind = line["step"], line.get("kind", "train")
                if type(step) is not int or abs(step) >= 2**62:
                    raise ValueError("the step is not a number of a step")
            except (ValueError, TypeError, AttributeError, KeyError):
                self._note_damage()
                continue
            if kind == "train":
                train.append(line)
            elif kind == "evaluation":
                self._add_evaluation(line)
        self.train.extend(train)
        for names, lines in groupby(train, key=tuple):
            facts = [name for name in names if name.startswith("run/")]
            for line in lines if facts else ():
                self.reported.update({name: line[name] for name in facts})
        return end > 0

    def read(self) -> None:
        """Read everything."""
        while self.refresh():
            pass

    def notices(self) -> list[str]:
        """Return what is wrong with the file, in words."""
        if not self.damaged_lines:
            return []
        where = ", ".join(map(str, self.damaged)) + (" ..." if self.damaged_lines > len(self.damaged) else "")
        return [f"{self.damaged_lines} damaged lines of {self.path.name} were left out: {where}"]

    def _add_evaluation(self, line: dict[str, object]) -> None:
        finite = {name: value for name, value in line.items() if math.isfinite(_number(value))}
        line = finite | {"kind": "evaluation"}
        if self.evaluations and self.evaluations[-1]["step"] == line["step"]:
            self.evaluations[-1].update(line)
        else:
            self.evaluations.append(line)

    def _note_damage(self) -> None:
        self.damaged_lines += 1
        if len(self.damaged) < _DAMAGED:
            self.damaged.append(max(1, self._lines))
