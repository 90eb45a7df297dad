"""Types and limits in words: ``a whole number``, ``'mean' or 'sum'``, ``greater than 0``. Read from the JSON schema."""

from typing import Any

from pydantic import TypeAdapter

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "a mapping",
    "array": "a list",
}
_LIMITS = {
    "exclusiveMinimum": "greater than {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "less than {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
    "minItems": "a list of at least {}",
    "maxItems": "a list of at most {}",
    "minProperties": "a mapping of at least {}",
    "maxProperties": "a mapping of at most {}",
    "minLength": "a text of at least {} characters",
    "maxLength": "a text of at most {} characters",
    "pattern": "a text matching {}",
}


Schema = dict[str, Any]


def describe(annotation: object) -> str:
    """Describe the values of a type."""
    return _describe(*_schema(annotation))


def limits(annotation: object) -> list[str]:
    """Describe the bounds of a type."""
    parts = [part for part in _alternatives(*_schema(annotation)) if "prefixItems" not in part]
    phrases = [phrase.format(part[name]) for part in parts for name, phrase in _LIMITS.items() if name in part]
    return [phrase.replace(" 1 characters", " 1 character") for phrase in phrases]


def choices(annotation: object) -> list[str]:
    """Return the strings that are allowed, by themselves or as the items of a list, if a type allows only some."""
    schema, definitions = _schema(annotation)
    parts = _alternatives(schema, definitions)
    parts += [item for part in parts if "items" in part for item in _alternatives(part["items"], definitions)]
    values = [value for part in parts for value in _choices(part)]
    return [value for value in values if isinstance(value, str)]


def _schema(annotation: Any) -> tuple[Schema, dict[str, Schema]]:
    schema = TypeAdapter(annotation).json_schema(ref_template="{model}")
    return schema, schema.get("$defs", {})


def _alternatives(schema: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    schema = definitions.get(schema.get("$ref", ""), schema)
    return [each for part in schema.get("anyOf", ()) for each in _alternatives(part, definitions)] or [schema]


def _choices(schema: Schema) -> list[object]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _describe(schema: Schema, definitions: dict[str, Schema]) -> str:
    words = dict.fromkeys(_describe_one(part, definitions) for part in _alternatives(schema, definitions))
    return " or ".join(sorted(words, key=lambda word: word == "null"))


def _describe_one(schema: Schema, definitions: dict[str, Schema]) -> str:
    kind = _TYPES.get(schema.get("type", ""), "anything")
    values = schema.get("additionalProperties")
    if "component" in schema:
        return f"a component (type: {schema['component']}; or a dotted path)"
    if chosen := _choices(schema):
        return " or ".join("null" if value is None else repr(value) for value in chosen)
    if "properties" in schema:
        return f"{kind} ({', '.join(schema['properties'])})"
    if isinstance(values, dict):
        return f"{kind} whose values are {_describe(values, definitions)}"
    if "prefixItems" in schema:
        items = [_describe(item, definitions) for item in schema["prefixItems"]]
        return f"{kind} of {len(items)}: {', '.join(items)}"
    if schema.get("items"):
        return f"{kind}, each item {_describe(schema['items'], definitions)}"
    return "a path" if schema.get("format") == "path" else kind
