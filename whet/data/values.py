"""Values of tables as values of JSON. A table has every field in every row, so a null there is an absent field."""

import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without fields, and fields of objects in it, that are null, NaN or bytes (images, sounds)."""
    return {name: plain for name, value in row.items() if (plain := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return without_nulls(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return None if isinstance(value, bytes | bytearray) else value
