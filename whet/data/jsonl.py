"""The objects of JSONL files, each with its file and line."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.base.strict_json import STRICT, TABLES

Placed = tuple[str, dict[str, Any]]  # ("train.jsonl:17", an object)


LeaveOut = Callable[[DataError], None]
"""Called with the problem of a damaged row, which is then left out; without it the problem is raised."""


_OVER_LINES = {
    b"{": "; write each row on one line",
    b"[": "; a list over several lines is read from a file whose name ends in .json",
}


class WrongRowError(DataError):
    """A row is damaged, or a field of it is wrong."""


def folder_of(where: str) -> Path | None:
    """Return the folder of the file that a place is in; None for a place in no file."""
    return _folder_of_file(where.rpartition(":")[0])


@lru_cache(maxsize=64)
def _folder_of_file(file: str) -> Path | None:
    return Path(file).parent if Path(file).is_file() else None


def iterate_jsonl(path: str | Path, nan_is_null: bool = False, leave_out: LeaveOut | None = None) -> Iterator[Placed]:
    """Yield the objects of a file. Blank lines and a byte order mark are allowed. With ``nan_is_null``, ``NaN``, which
    tables have for a missing cell, is read as null. ``leave_out`` is called with the error of a wrong line.

    Raises ``DataError`` for a file that can't be read and, naming the line, for a line that is not a JSON object, or
    has a duplicate key or a number that is not finite, unless there is ``leave_out``.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise DataError(f"can't read {path}: it is {kind}, and a JSONL file is needed")
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    row = _parse(line, f"{path}:{number}", nan_is_null)
                except DataError as problem:
                    if leave_out is None:
                        raise
                    leave_out(problem)
                    continue
                yield f"{path}:{number}", row
    except (OSError, EOFError, zlib.error) as problem:  # the last two of gzip
        raise DataError(f"can't read {path}: {getattr(problem, 'strerror', None) or problem}") from None


def _parse(line: bytes, where: str, nan_is_null: bool) -> dict[str, object]:
    try:
        value = (TABLES if nan_is_null else STRICT).decode(line.decode())
    except UnicodeDecodeError as problem:
        raise WrongRowError(
            f"{where}: not UTF-8: {problem.reason} at byte {problem.start + 1} of the line; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as problem:
        if line.startswith(b"version https://git-lfs"):
            raise DataError(f"{where}: a pointer of Git LFS, not the data; fetch the file with: git lfs pull") from None
        hint = _OVER_LINES.get(line.strip(), "")
        raise WrongRowError(f"{where}: not valid JSON: {problem.msg} at column {problem.colno}{hint}") from None
    except ValueError as problem:
        raise WrongRowError(f"{where}: not JSON that can be read: {problem}") from None
    if not isinstance(value, dict):
        hint = "; a file that is one list is read as .json" if isinstance(value, list) else ""
        raise WrongRowError(f"{where}: a row must be a JSON object, not {type(value).__name__}{hint}")
    return value
