"""Conversion of the values of XML and CSV, whose leaves are texts, to the types of a JSON schema."""

from collections.abc import Iterator
from typing import Any

from whet.base.strict_json import STRICT, JsonObject
from whet.tasks.structured.json_schema import fits_part, referred


def as_schema(value: object, schema: Any, root: JsonObject) -> object:
    """Return the value with its texts converted to the types of the schema, a part of ``root``, and single items to
    lists. Of the branches of an ``anyOf`` or ``oneOf`` the first counts that the converted value fits. An empty text is
    null where the schema allows null.

    >>> branches = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    >>> as_schema(["5", ""], {"items": branches}, {})
    [5, None]
    """
    schema = schema if isinstance(schema, dict) else {}
    for part in (*([schema["$ref"]] if "$ref" in schema else ()), *schema.get("allOf", ())):
        value = as_schema(value, referred(part, root) if isinstance(part, str) else part, root)
    for name in ("anyOf", "oneOf"):
        value = _of_branches(value, schema.get(name, ()), root)
    if "array" in _kinds(schema) and not isinstance(value, list):
        converted = [as_schema(items, schema, root) for items in _lists(value)]
        return next((items for items in converted if fits_part(items, schema, root)), converted[0])
    if isinstance(value, str):
        return _of_text(value, schema)
    if isinstance(value, list):
        return [as_schema(item, schema.get("items"), root) for item in value]
    if isinstance(value, dict):
        parts, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: as_schema(item, parts.get(name, others), root) for name, item in value.items()}
    return value


def resolved(schema: Any, root: JsonObject) -> JsonObject:
    """Return the schema to which the references of a schema lead."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = referred(schema["$ref"], root)
    return schema if isinstance(schema, dict) else {}


def _of_branches(value: object, branches: Any, root: JsonObject) -> object:
    for branch in sorted(branches, key=lambda branch: value != "" or "null" not in _kinds(resolved(branch, root))):
        converted = as_schema(value, branch, root)
        if fits_part(converted, branch, root):
            return converted
    return value


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
