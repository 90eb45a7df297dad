"""JSON decoders that refuse duplicate keys and non-finite numbers, which Python's own decoder accepts."""

import json
import math
from typing import Any


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number; write null or leave the field out")
    return number


def _null(text: str) -> float | None:
    return None if text == "NaN" else _finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_finite)
"""Refuses duplicate keys and non-finite numbers."""

TABLES = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_null)
"""Like ``STRICT``, but reads ``NaN`` as null, because tables write it for a missing cell."""
