"""The metrics of a run in columns, read from ``metrics.jsonl`` as the run writes it.

A run of 100,000 steps with 50 metrics takes 40 MB. Only complete lines are read; a file that was cut or replaced, as a
resumed run does, is read from the beginning.
"""

import os
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from whet.metrics.sinks.jsonl import FILE

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

    def add(self, line: dict[str, Any]) -> None:
        """Add a line. Later values of a step replace earlier ones."""
        step = line["step"]
        row = len(self._steps)
        if not row or step > self._steps[-1]:
            self._steps.append(step)
        elif self._steps[row := bisect_left(self._steps, step)] != step:
            for values in self._columns.values():
                if row < len(values):
                    values.insert(row, float("nan"))
            self._steps.insert(row, step)
        for name, value in line.items():
            if value is None:
                value = float("inf")
            elif type(value) is not float and type(value) is not int:
                continue
            values = self._columns.get(name)  # type: ignore[assignment]
            if values is None:
                if name == "step" or len(self._columns) >= _MOST_NAMES:
                    continue
                values = self._columns[name] = array("d")
            if len(values) < row:
                values.extend([float("nan")] * (row - len(values)))
            if len(values) == row:
                values.append(value)
            else:
                values[row] = value


class History:
    """All metrics of a run folder so far. ``refresh`` reads what was added."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._reset()

    def _reset(self) -> None:
        self.train = Table()
        self.evaluations: list[dict[str, Any]] = []  # in order, one for each step
        self.reported: dict[str, Any] = {}  # the values named run/...
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
        for text in data[:end].split(b"\n")[:-1]:
            self._lines += 1
            try:
                self._add(from_json(text))
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
                self._note_damage()
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

    def _add(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if type(step) is not int:
            raise TypeError("the step is not a whole number")
        kind = line.get("kind", "train")
        if kind == "evaluation":
            if self.evaluations and self.evaluations[-1]["step"] == step:
                self.evaluations[-1].update(line)
            else:
                self.evaluations.append(line)
        elif kind == "train":
            self.reported.update({name: value for name, value in line.items() if name.startswith("run/")})
            self.train.add(line)

    def _note_damage(self) -> None:
        self.damaged_lines += 1
        if len(self.damaged) < _DAMAGED:
            self.damaged.append(max(1, self._lines))
