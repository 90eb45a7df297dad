"""The types of arguments that a notation writes without quotes, by the schemas of the tools."""

import contextlib
from collections.abc import Mapping
from typing import Any

from whet.base.strict_json import STRICT
from whet.chat.notations.parts import Tools

_WORDS = {"True": True, "False": False, "None": None}  # the spelling of these values in some templates


def functions(tools: Tools | None) -> dict[str, Mapping[str, object]]:
    """Return the schemas of the functions' arguments by name; an empty schema where a tool has none."""
    schemas = dict[str, Mapping[str, Any]]()
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            schemas[name] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def types_of(key: str, parameters: Mapping[str, object]) -> set[str]:
    """Return the types that an argument may have; empty if the schema has none or is invalid."""
    properties: Any = parameters.get("properties")
    try:
        return _types(_resolved(properties[key], parameters))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return set()


def typed(text: str, types: set[str]) -> object:
    """Return the value of an argument that is written without quotes: JSON, unless it may be a text."""
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    with contextlib.suppress(ValueError):
        return STRICT.decode(text.strip())
    return text  # the validation of the arguments reports the error


def _resolved(schema: Mapping[str, object], whole: Mapping[str, object]) -> Mapping[str, object]:
    """Return the schema, or the definition that its ``$ref`` refers to."""
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    definitions: Any = whole.get(place) or {}
    definition = definitions.get(name) if name else None
    return definition if isinstance(definition, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if it has none."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for part in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        types |= (_types(part) or {"string"}) if isinstance(part, Mapping) else set()
    texts = any(isinstance(value, str) for value in schema.get("enum", ()))
    return types or ({"string"} if texts or "const" in schema else set())
