"""JSON: the type of a decoded object, and decoders that refuse duplicate keys and non-finite numbers, which Python's
own decoder accepts."""

import json
import math
from typing import Any

JsonObject = dict[str, Any]
"""An object of JSON as a decoder returns it. The types of its values are unknown until they are checked."""


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def finite(text: str) -> float:
    """Return the number of a text. Raises ``ValueError`` if it is not finite."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number; write null or leave the field out")
    return number


def _null(text: str) -> float | None:
    return None if text == "NaN" else finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=finite, parse_constant=finite)
"""Refuses duplicate keys and non-finite numbers."""

TABLES = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=finite, parse_constant=_null)
"""Like ``STRICT``, but reads ``NaN`` as null, because tables write it for a missing cell."""
