"""Grading of an answer by a JSON schema and by the values of its fields. Called in worker processes."""

from typing import Literal

from whet.tasks.structured.json_schema import fits
from whet.tasks.structured.text import Format, parse, unfenced

Content = Literal["share", "exact", "filled"]
WRONG = {"reward": 0.0, "correct": 0.0, "format": 0.0}


def grade_in_worker(
    answer: str,
    form: Format,
    fence: bool,
    schema: dict[str, object],
    opened: dict[str, object],
    gold: object,
    content: Content,
) -> dict[str, float]:
    """Return the scores of an answer. ``format`` is 1 if it fits the schema, both strict and ``opened``; ``correct`` is
    1 if all of its fields are right, too. The reward is the share of fields that are right or, with ``filled``, not
    empty."""
    try:
        value = parse(unfenced(answer) if fence else answer, form, schema)
    except Exception:  # parsers raise many kinds of errors on the texts of models
        return WRONG
    try:
        if not fits(value, schema, opened):
            return WRONG
        share = _filled(value) if content == "filled" else _right(value, gold)
    except (RecursionError, OverflowError):  # multipleOf overflows on whole numbers larger than any float
        return WRONG
    right = float(share == 1)
    return {"reward": right if content == "exact" else share, "correct": right, "format": 1.0}


def _right(value: object, gold: object) -> float:
    """Return the share of equal fields among the fields that either value has."""
    given, right = _leaves(value), _leaves(gold)
    return sum(given[path] == right[path] for path in given.keys() & right.keys()) / len(given.keys() | right.keys())


def _filled(value: object) -> float:
    """Return the share of fields that are not empty."""
    leaves = _leaves(value)
    return sum(leaf not in _EMPTY for leaf in leaves.values()) / len(leaves)


def _leaves(value: object, path: str = "") -> dict[str, tuple[str, object]]:
    """Return the texts, numbers and empty containers in a value by their path. Their kind distinguishes ``true`` from
    ``1``."""
    parts = [*value.items()] if isinstance(value, dict) else [*enumerate(value)] if isinstance(value, list) else []
    if parts:
        return {key: leaf for name, part in parts for key, leaf in _leaves(part, f"{path}/{name!r}").items()}
    if isinstance(value, str):
        return {path: ("text", " ".join(value.split()).casefold())}
    kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    return {path: (kind, repr(value) if kind in ("dict", "list") else value)}


_EMPTY = (("text", ""), ("NoneType", None), ("dict", "{}"), ("list", "[]"))
