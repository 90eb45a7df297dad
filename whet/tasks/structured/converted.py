"""Conversion of the values of XML and CSV, whose leaves are texts, to the types of a JSON schema."""

from collections.abc import Iterator
from typing import Any

from whet.base.strict_json import STRICT, JsonObject
from whet.tasks.structured.json_schema import Checker, referred


def as_schema(value: object, schema: JsonObject) -> object:
    """Return the value with its texts converted to the types of the schema, and single items to lists. Of the branches
    of an ``anyOf`` or ``oneOf`` the first counts that the converted value fits. An empty text is null where the schema
    allows null.

    >>> branches = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    >>> as_schema(["5", ""], {"items": branches})
    [5, None]
    """
    return _Conversion(schema).of(value, schema)


class _Conversion:
    """Converts a value once to each reference of a schema; see ``Checker``."""

    def __init__(self, root: JsonObject) -> None:
        self._root, self._checker = root, Checker(root)
        self._referred: dict[tuple[int, str], tuple[object, object]] = {}  # (value, which keeps its id; converted)

    def of(self, value: object, schema: Any) -> object:
        schema = schema if isinstance(schema, dict) else {}
        if "$ref" in schema:
            value = self._of_reference(value, schema["$ref"])
        for part in schema.get("allOf", ()):
            value = self.of(value, part)
        for name in ("anyOf", "oneOf"):
            value = self._of_branches(value, schema.get(name, ()))
        if "array" in _kinds(schema) and not isinstance(value, list):
            converted = [self.of(items, schema) for items in _lists(value)]
            return next((items for items in converted if self._checker.fits(items, schema)), converted[0])
        if isinstance(value, str):
            return _of_text(value, schema)
        if isinstance(value, list):
            return [self.of(item, schema.get("items")) for item in value]
        if isinstance(value, dict):
            parts, others = schema.get("properties", {}), schema.get("additionalProperties")
            return {name: self.of(item, parts.get(name, others)) for name, item in value.items()}
        return value

    def _of_reference(self, value: object, reference: str) -> object:
        place = id(value), reference
        if place not in self._referred:
            self._referred[place] = value, self.of(value, referred(reference, self._root))
        return self._referred[place][1]

    def _of_branches(self, value: object, branches: Any) -> object:
        def last(branch: Any) -> bool:
            return value != "" or "null" not in _kinds(resolved(branch, self._root))

        for branch in sorted(branches, key=last):
            converted = self.of(value, branch)
            if self._checker.fits(converted, branch):
                return converted
        return value


def resolved(schema: Any, root: JsonObject) -> JsonObject:
    """Return the schema to which the references of a schema lead."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = referred(schema["$ref"], root)
    return schema if isinstance(schema, dict) else {}


def _lists(value: object) -> Iterator[list[object]]:
    """Yield the lists that a single value may stand for: its own items, as in ``<tags><tag>a</tag></tags>``, or
    itself as the only item."""
    if isinstance(value, dict) and len(value) == 1:
        (inner,) = value.values()
        yield inner if isinstance(inner, list) else [inner]
    yield [value] if value else []


def _of_text(text: str, schema: JsonObject) -> object:
    """Return the value that a text stands for in a schema: a number, a boolean, null, or itself."""
    kinds, values = _kinds(schema), schema.get("enum", [schema["const"]] if "const" in schema else [text])
    if not text.strip() and "null" in kinds:
        return None
    if "string" in kinds or (not kinds and text in values):
        return text
    try:
        return STRICT.decode(text.strip().lower() or "null")
    except ValueError:
        return text


def _kinds(schema: JsonObject) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)
