"""JSON schemas made strict: every object must have all of its properties and no others."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from whet.base.extras import extra
from whet.base.strict_json import JsonObject

_CLOSED = ("items", "prefixItems", "additionalProperties", "unevaluatedItems", "contains")
_CLOSED_BY_NAME = ("properties", "patternProperties")
_SHARED = ("allOf", "then", "else")  # they apply to the same object as the schema around them
_SHARED_BY_NAME = ("dependentSchemas", "$defs", "definitions")
_JUDGES = ("properties", "patternProperties", "$ref", *_SHARED, "dependentSchemas")
_PARTS = {*_CLOSED, *_SHARED, "anyOf", "oneOf", "not", "if", "propertyNames", "unevaluatedProperties",
          "additionalItems", "contentSchema"}  # fmt: skip
_PARTS_BY_NAME = {*_CLOSED_BY_NAME, *_SHARED_BY_NAME}
_FOLLOWING = ("$ref", "unevaluatedProperties", "unevaluatedItems")  # keywords that check what references lead to
_PROBES: tuple[Any, ...] = (None, "", 0, [], [None], {}, {"": None})


@cache
def _library() -> ModuleType:
    """Return jsonschema, which is imported with the first schema: the class of the task set is used without it."""
    with extra("tasks", "data.type=structured_output"):
        import jsonschema
    return jsonschema


def strict_schema(text: str | dict[str, object]) -> JsonObject:
    """Return a schema of draft 2020-12, made strict by ``closed``. Raises ``ValueError`` for anything but a schema, for
    a ``$ref`` to another document or to a missing place, and for endless recursion."""
    try:
        schema = json.loads(text) if isinstance(text, str) else text
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
        made: JsonObject = closed(schema)
        _library().Draft202012Validator.check_schema(made)
        _check_references(made, made)
        opened = open_schema(schema)
        for probe in _PROBES:
            fits(probe, made, opened)
    except _library().SchemaError as error:
        raise ValueError(f"it is not a JSON schema: {error.message[:200]}") from None
    except RecursionError:
        raise ValueError("it refers to itself without end, or is nested too deeply") from None
    return made


def open_schema(schema: dict[str, object]) -> JsonObject:
    """Return the schema with every property required, which allows further properties where the original does. An
    invalid schema, as some published ones are, is returned strict."""
    made: JsonObject = closed(schema, close=False)
    try:
        _library().Draft202012Validator.check_schema(made)
    except _library().SchemaError:
        made = closed(schema)
    return made


def fits(value: object, strict: dict[str, object], opened: dict[str, object]) -> bool:
    """Return whether a value fits both forms of a schema. The strict form alone would accept a value that fits two
    branches of a ``oneOf``, one of them closed, and values that an ``additionalProperties`` outside the closed places
    refuses."""
    return all(Checker(form).fits(value) for form in (strict, opened))


class Checker:
    """Checks values against a schema whose references are places in itself. A part of a value is checked once at each
    of these places: else branches that lead to one definition would double the work with each level of a value."""

    def __init__(self, schema: JsonObject) -> None:
        self._errors: dict[tuple[str, int, int], list[object]] = {}  # of the value that is being checked
        plain = _library().Draft202012Validator
        once = {keyword: self._once(keyword, plain.VALIDATORS[keyword]) for keyword in _FOLLOWING}
        kind: Any = _library().validators.extend(plain, once)
        self._validator = kind({name: part for name, part in schema.items() if name != "$schema"})  # it names a class

    def _once(self, keyword: str, check: Callable[..., Iterator[object]]) -> Callable[..., list[object]]:
        def checked(validator: object, value: object, instance: object, part: JsonObject) -> list[object]:
            place = keyword, id(instance), id(part)
            if place not in self._errors:
                self._errors[place] = [*islice(check(validator, value, instance, part), 1)]
            return self._errors[place]

        return checked

    def fits(self, value: object, part: object = None) -> bool:
        """Return whether a value fits the schema, or a part of it."""
        self._errors.clear()
        return bool((self._validator if part is None else self._validator.evolve(schema=part)).is_valid(value))


def closed(schema: object, here: bool = True, close: bool = True) -> Any:
    """Return the schema with every property required and, if it describes a whole value (``here``), no others allowed.
    ``close`` false: others stay allowed where the schema allows them.

    Properties that ``allOf`` and ``$ref`` add to an object are its own, so the schema around them is closed, not they.
    The branches of ``anyOf`` and ``oneOf`` are closed one by one if nothing else describes the object.

    >>> closed({"anyOf": [{"properties": {"a": {}}}]})
    {'anyOf': [{'properties': {'a': {}}, 'required': ['a'], 'unevaluatedProperties': False}]}
    """
    if isinstance(schema, list):
        return [closed(item, here, close) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: value for name, value in schema.items() if name not in ("$id", "$schema")}
    if isinstance(made.get("items"), list):  # tuples of earlier drafts
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
    dependencies = made.pop("dependencies", None)  # of earlier drafts, too
    for name, needed in dependencies.items() if isinstance(dependencies, dict) else ():
        kind = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        made[kind] = {**made.get(kind, {}), name: needed}
    judged = any(name in made for name in _JUDGES)
    for name, value in made.items():
        if name in _CLOSED:
            made[name] = closed(value, True, close)
        elif name in _SHARED or name in ("anyOf", "oneOf"):
            made[name] = closed(value, here and not judged and name not in _SHARED, close)
        elif name in (*_CLOSED_BY_NAME, *_SHARED_BY_NAME) and isinstance(value, dict):
            made[name] = {key: closed(part, name in _CLOSED_BY_NAME, close) for key, part in value.items()}
    for part in made.get("$defs", {}).values() if isinstance(made.get("$defs"), dict) else ():
        if close and isinstance(part, dict) and part.keys() <= {"type", "title", "description"}:
            part["additionalProperties"] = True  # an object of any form
    if isinstance(made.get("properties"), dict):
        if close:
            made.pop("additionalProperties", None)
        made["required"] = list(made["properties"])
    if here and judged and close:
        made["unevaluatedProperties"] = False
    return made


def referred(reference: object, root: Any) -> object:
    """Return the part of a schema at ``#/$defs/name``. Raises ``ValueError`` for an address outside the schema, or of a
    missing part."""
    part = root
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        raise ValueError(f"$ref must lead to a place in the schema, as in #/$defs/name, not to {reference!r}")
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        index = int(name) if isinstance(part, list) and name.isdigit() else name
        try:
            part = part[index]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"$ref {reference!r} leads nowhere") from None
    return part


def _check_references(part: object, root: object) -> None:
    """Follow each ``$ref`` of a schema, except in values such as those in ``enum``, ``const`` and ``examples``."""
    if isinstance(part, list):
        for item in part:
            _check_references(item, root)
    if not isinstance(part, dict):
        return
    if "$ref" in part:
        referred(part["$ref"], root)
    if "$dynamicRef" in part or "$recursiveRef" in part:
        raise ValueError("$dynamicRef and $recursiveRef are not supported; write $ref")
    for name, value in part.items():
        if name in _PARTS:
            _check_references(value, root)
        elif name in _PARTS_BY_NAME and isinstance(value, dict):
            _check_references([*value.values()], root)
