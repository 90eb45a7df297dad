"""Columns of rows that training doesn't read, such as an id or a category. They go into the output in addition to the
fields of the row, so that filters, reward functions and readers of the files find them."""

import json
from collections.abc import Mapping, Sequence

from whet.base.strict_json import JsonObject
from whet.data.image_rows import image_column
from whet.prep.manifest import SourceTally


def with_columns(
    fields: JsonObject, others: Mapping[str, object], keep: Sequence[str] | None, tally: SourceTally
) -> JsonObject:
    """Return the fields of a row and its other columns. Count the rows of each column that is kept or left out,
    because it is not in ``keep`` (None: all are) or because JSON can't hold its value."""
    kept = {}
    for name, value in others.items():
        if (keep is None or name in keep) and _is_json(value):
            kept[name] = value
            tally.columns[name] = tally.columns.get(name, 0) + 1
        else:
            tally.left_out[name] = tally.left_out.get(name, 0) + 1
    return {name: value for name, value in fields.items() if name not in others} | kept


def count_bytes(values: Mapping[str, object], tally: SourceTally) -> None:
    """Count the columns of bytes, such as sounds, in the values of a file's row. Rows are read without these, unless
    they are images."""
    images = image_column(values)
    for name, value in values.items():
        if isinstance(value, bytes | bytearray) and name != images:
            tally.left_out[name] = tally.left_out.get(name, 0) + 1


def _is_json(value: object) -> bool:
    if isinstance(value, bool | int | None):
        return True
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):  # also of half a surrogate pair
        return False
    return True
