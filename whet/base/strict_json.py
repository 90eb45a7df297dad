"""JSON: the type of a decoded object, and decoders that refuse duplicate keys, non-finite numbers and deep nesting,
which Python's own decoder accepts."""

import json
import math
from collections.abc import Iterable
from typing import Any

JsonObject = dict[str, Any]
"""An object of JSON as a decoder returns it. The types of its values are unknown until they are checked."""

MOST_LEVELS = 100  # of objects and lists in each other

TOO_DEEP = f"it is nested too deeply, in more than {MOST_LEVELS} levels"


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


class _Decoder(json.JSONDecoder):
    """Python's own decoder reads some hundreds or thousands of levels, depending on its version; functions that walk
    through such a value would then meet the interpreter's limit of recursion."""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        try:
            value, end = super().raw_decode(s, idx)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
        if s.count("[", idx, end) + s.count("{", idx, end) > MOST_LEVELS and is_deep(value):
            raise ValueError(TOO_DEEP)
        return value, end


def is_deep(value: object) -> bool:
    """Return whether objects and lists are nested in more than ``MOST_LEVELS`` levels."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [part for container in level for part in _parts(container) if isinstance(part, dict | list)]
    return bool(level)


def _parts(container: Any) -> Iterable[object]:
    return container.values() if isinstance(container, dict) else container


STRICT = _Decoder(object_pairs_hook=_distinct_keys, parse_float=finite, parse_constant=finite)
"""Refuses duplicate keys, non-finite numbers and more than ``MOST_LEVELS`` levels."""

TABLES = _Decoder(object_pairs_hook=_distinct_keys, parse_float=finite, parse_constant=_null)
"""Like ``STRICT``, but reads ``NaN`` as null, because tables write it for a missing cell."""
