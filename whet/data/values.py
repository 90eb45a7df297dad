"""Values of tables as values of JSON. A table has every field in every row, so a null there is an absent field."""

import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any


def without_nulls(row: Mapping[str, object]) -> dict[str, object]:
    """Return the row without fields, and fields of objects in it, that are null or NaN. Bytes (images, sounds) stay."""
    return {name: plain for name, value in row.items() if (plain := _plain(value)) is not None}


def without_bytes(row: Mapping[str, object]) -> dict[str, object]:
    """Return the row without fields, and fields of objects in it, that are bytes."""
    return {name: _json(value) for name, value in row.items() if not isinstance(value, bytes | bytearray)}


def _plain(value: Any) -> object:
    if isinstance(value, dict):
        return without_nulls(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


def _json(value: object) -> object:
    if isinstance(value, dict):
        return without_bytes(value)
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if isinstance(value, bytes | bytearray) else value
