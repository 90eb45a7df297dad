"""Rows that a script or notebook holds in memory, as dicts, and their way into a JSONL file.

Accepts what people have: a list of dicts, a ``datasets.Dataset``, a ``pandas.DataFrame``, with images of Pillow among
the values. Imports none of these libraries.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.strict_json import TOO_DEEP, is_deep
from whet.data.jsonl import Placed
from whet.fetch.images import is_image, read_image


def as_rows(data: Iterable[Mapping[str, object]], name: str = "data") -> list[Placed]:
    """Return the rows of a list, data set or table, each with its place, as in "row 3 of data" (from 0); missing cells
    of a table become None. ``name`` is the argument that holds them. Raises ``DataError`` naming the first row that is
    not a dict."""
    table: Any = data
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # iterating over a DataFrame yields its columns
        names = list(table.columns)
        if any(not isinstance(each, str) or names.count(each) > 1 for each in names):
            raise DataError(f"{name} has the columns {reprlib.repr(names)}; each needs its own name, a text")
        data = table.astype(object).where(table.notna(), None).to_dict("records")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        splits = [key for key, part in data.items() if hasattr(part, "features")] if isinstance(data, Mapping) else []
        hint = f"; give one of its splits, as in {name}[{splits[0]!r}]" if splits else ""
        raise DataError(
            f"{name} is a {type(data).__name__}; it must be a list of dicts, a Dataset or a DataFrame{hint}"
        )
    rows = []
    for number, row in enumerate(data):
        where = f"row {number} of {name}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is a {type(row).__name__}; it must be a dict of columns")
        try:
            rows.append((where, {name: _in_lists(value) for name, value in row.items()}))
        except RecursionError:
            raise DataError(f"{where} has a value that contains itself, or is nested too deeply") from None
        if is_deep(rows[-1][1]):
            raise DataError(f"{where}: {TOO_DEEP}")
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def _in_lists(value: object) -> object:
    """Return the value with lists in place of tuples, as a file would have them."""
    if isinstance(value, list | tuple):
        return [_in_lists(each) for each in value]
    return {name: _in_lists(each) for name, each in value.items()} if isinstance(value, dict) else value


def write_rows(path: Path, rows: Sequence[Placed]) -> None:
    """Write the rows as JSONL. Raises ``DataError`` naming the row with a value that JSON does not have."""
    write_atomically(path, "".join(f"{_line(row, where)}\n" for where, row in rows))


def _line(row: Mapping[str, object], where: str) -> str:
    try:
        return json.dumps(row, allow_nan=False, default=_plain)
    except (TypeError, ValueError, DataError):
        for column, value in row.items():
            try:
                json.dumps({column: value}, allow_nan=False, default=_plain)
            except (TypeError, ValueError, DataError) as error:
                why = "it has a number that is not finite: use None" if "JSON compliant" in str(error) else error
                raise DataError(f"{where}: column {column!r}: {why}") from None
        raise


def _plain(value: object) -> object:
    """Return a numpy value as Python's, and an image as a data URL."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes) or is_image(value):
        return read_image(value)
    raise TypeError(f"a value of type {type(value).__name__} is not a value of JSON")
