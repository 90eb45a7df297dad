"""Decoded JSON against the declared types of a dataclass. By itself a dataclass takes any value, and a text in the
place of a number would end in an error far from the file."""

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from whet.config.tree import dotted
from whet.config.validation import got

_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping", "dataclass_type": "a mapping",
}  # fmt: skip


def check_types(kind: type, values: object) -> None:
    """Raise ``ValueError`` that names the first key whose value is missing or has another type than the field of the
    dataclass. Keys without a field are not looked at."""
    check_type(_adapter(kind), values)


def check_type(adapter: TypeAdapter[Any], values: object) -> None:
    """Raise ``ValueError`` that names the first key whose value is not of the adapter's type."""
    try:
        encoded = to_json(values, inf_nan_mode="constants")
    except PydanticSerializationError:  # of half a character, which is not UTF-8
        encoded = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    try:
        adapter.validate_json(encoded, strict=True)  # as JSON, in which lists stand for tuples
    except ValidationError as error:
        raise ValueError(_words(error.errors(include_url=False), values)) from None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _words(wrong: list[ErrorDetails], values: object) -> str:
    """Describe the errors at the first place; there are several if a value fits no member of a union."""
    place, value = _place(wrong[0], values)
    wrong_here = [each for each in wrong if _place(each, values)[0] == place]
    # A class in a union, such as a tensor, can't be written in JSON.
    expected = dict.fromkeys(_expected(each) for each in wrong_here if each["type"] != "needs_python_object")
    text = "is missing" if wrong[0]["type"] == "missing" else f"expected {' or '.join(expected)}, got {got(value)}"
    return f"{dotted(place)}: {text}" if place else text


def _expected(error: ErrorDetails) -> str:
    if error["type"] == "too_long":
        return f"at most {error['ctx']['max_length']} items"
    if error["type"].startswith(("greater_than", "less_than")):
        return f"a number {error['msg'].removeprefix('Input should be ')}"
    return _EXPECTED.get(error["type"], error["msg"].removeprefix("Input should be "))


def _place(error: ErrorDetails, values: Any) -> tuple[tuple[str, ...], object]:
    """Return the keys that lead to a value, and the value. Other parts of pydantic's place name a member of a union."""
    place: tuple[str, ...] = ()
    for part in error["loc"]:
        if part in (values if isinstance(values, dict) else range(len(values) if isinstance(values, list) else 0)):
            place, values = (*place, str(part)), values[part]
    if error["type"] == "missing":
        place = (*place, str(error["loc"][-1]))
    return place, values
