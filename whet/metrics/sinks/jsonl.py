"""``metrics.jsonl``: the metrics of a run, the source of report and summary. One line per step and kind.

A line is on disk before ``write`` returns. It is always valid JSON: a non-finite number is null, and its name is in the
line's ``not_finite`` list.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from whet.base.errors import DataError
from whet.base.files import error_context, sync_folder, write_atomically
from whet.base.strict_json import JsonObject
from whet.config.validation import got
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
RESERVED = ("step", "kind", "not_finite")
_TOO_LARGE = 1 << 62  # for a number of a step


class JSONLSink(SinkConfig):
    """Append to ``metrics.jsonl`` in the run folder."""

    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> "JSONLWriter":
        path = folder / FILE
        if resume_step is not None:
            if resume_step > 0 and not path.exists():
                log.warning("%s is missing: the report will begin at step %d", path, resume_step + 1)
            truncate_after(path, resume_step)
            last = max(
                (line["step"] for _, _, line in read_lines(path, check_metrics)),
                default=0 if path.exists() else resume_step,
            )
            if last < resume_step:
                log.warning("%s was truncated: it ends at step %d, and the report will continue at step %d",
                            path, last, resume_step + 1)  # fmt: skip
        elif path.exists() and path.stat().st_size:
            raise DataError(f"{path} already has the metrics of a run; resume that run, or choose another folder")
        return JSONLWriter(path)


class JSONLWriter(Sink):
    """The open file; see ``JSONLSink``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with error_context(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened()
            self._folder = path.parent.stat()

    def _opened(self) -> int:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        sync_folder(self._path.parent)
        return file

    def _follow(self) -> None:
        """Open the file again if another one has its name, as after an edit, or none. A folder that was moved took the
        file along."""
        try:
            if not os.path.samestat(self._path.parent.stat(), self._folder):
                return
        except FileNotFoundError:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file)):
                return
        os.close(self._file)
        self._file = self._opened()
        log.warning("%s was removed or replaced during the run; its next lines are in the new file", self._path)

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        data = encode_line(step, {**values, "time/written": time.time()}, kind)
        with error_context(self._path):
            self._follow()
            while data:  # os.write may write only a part
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            if not os.fstat(self._file).st_size:
                self._path.unlink(missing_ok=True)  # a run that failed to start leaves no file
            os.close(self._file)
            self._file = -1


def encode_line(step: int, values: Mapping[str, Value], kind: Kind) -> bytes:
    """Return one line with its newline. Floats are written exactly."""
    line: JsonObject = {"step": int(step), "kind": kind}
    broken = []
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"a metric can't be called {name!r}")
        if not isinstance(value, str | int):  # float() converts numpy's and torch's scalars, too
            value = float(value)
            if not math.isfinite(value):
                broken.append(name)
                line[name] = None
                continue
        line[name] = value
    if broken:
        line["not_finite"] = broken
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def read_metrics(path: Path) -> list[JsonObject]:
    """Return the lines of a metrics file in order of step, one per step and kind (later values of a key win).

    An incomplete last line, left by a kill or still being written, is skipped. Raises DataError for any other invalid
    line. A missing file is an empty list."""
    merged: dict[tuple[int, str], JsonObject] = {}
    for _, _, line in read_lines(path, check_metrics):
        merged.setdefault((line["step"], line.get("kind", "train")), {}).update(line)
    return [merged[key] for key in sorted(merged, key=lambda key: key[0])]


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, and an incomplete last line, atomically. Does nothing if there are none."""
    if not path.exists():
        return
    kept = b"".join(raw for _, raw, line in read_lines(path) if line["step"] <= step)
    if len(kept) != path.stat().st_size:
        write_atomically(path, kept)


def without_time(line: Mapping[str, object]) -> dict[str, object]:
    """Return the line without the values that differ between two identical runs."""
    return {name: value for name, value in line.items() if not name.startswith(("time/", "idle/"))}


def finished_steps(file: BinaryIO) -> Iterator[tuple[int, JsonObject, int]]:
    """Yield each step of an open metrics file from its position on: the step, all its finite values, of training and
    evaluation, and the position after it. Only one step is in memory. An incomplete last line ends it. Raises DataError
    for an invalid line."""
    for step, group in groupby(_from_position(file), key=lambda line: line[0]["step"]):
        values, end = dict[str, Any](), 0
        for line, position in group:
            values |= {name: value for name, value in line.items() if value is not None and name not in RESERVED}
            end = position
        yield step, values, end


def _from_position(file: BinaryIO) -> Iterator[tuple[JsonObject, int]]:
    """Yield each complete line and the position after it."""
    start = file.tell()
    while (text := file.readline()).endswith(b"\n"):
        try:
            yield _decoded(text, check_metrics), file.tell()
        except ValueError as error:
            raise DataError(f"{file.name}: invalid line at byte {start} ({error}); remove it to continue") from error
        start = file.tell()


def check_metrics(line: JsonObject) -> None:
    """Raise ValueError for a value of a wrong type: a metric is a number, or null if it was not finite; a fact about
    the run may also be a text."""
    if not isinstance(kind := line.get("kind", "train"), str):
        raise ValueError(f"kind: expected text, got {got(kind)}")
    for name, value in line.items():
        if name in RESERVED or value is None or (isinstance(value, str) and name.startswith("run/")):
            continue
        try:
            fits = math.isfinite(value)
        except (TypeError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(f"{name}: expected a finite number, got {got(value)}")


def read_lines(
    path: Path, check: Callable[[JsonObject], None] = lambda line: None
) -> Iterator[tuple[int, bytes, JsonObject]]:
    """Yield each complete line: its number, raw and decoded. Raises DataError for an invalid line, one without
    ``step``, and one for which ``check`` raises ValueError."""
    *raw, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if last.endswith(b"}") and _is_json(last):  # an editor left out the last newline; a kill would leave half a line
        raw.append(last)
    for number, text in enumerate(raw, 1):
        try:
            line = _decoded(text, check)
        except ValueError as error:
            raise DataError(f"{path}:{number}: invalid line ({error}); remove it to continue") from error
        yield number, text + b"\n", line


def _decoded(text: bytes, check: Callable[[JsonObject], None]) -> JsonObject:
    line = json.loads(text)
    if not isinstance(line, dict):
        raise ValueError(f"expected a mapping, got {got(line)}")
    if type(step := line.get("step")) is not int or abs(step) >= _TOO_LARGE:
        raise ValueError(f"step: expected the number of a step, got {got(step)}")
    check(line)
    return line


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
