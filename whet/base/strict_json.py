"""JSON decoders that refuse what Python's own accepts: a key that is there twice, a number that is not finite."""

import json
import math
from typing import Any


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number; write null, or leave the field out")
    return number


def _null(text: str) -> float | None:
    return None if text == "NaN" else _finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_finite)
"""Refuses keys that are there twice and numbers that are not finite."""

TABLES = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_null)
"""As ``STRICT``, but reads ``NaN`` as null: tables write it for a cell that is missing."""
