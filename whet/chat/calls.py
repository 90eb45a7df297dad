"""Calls of tools, in the nested form of the OpenAI API, arguments as an object. Knows no text of a model."""

import json
import sys
from typing import Any

from whet.base.strict_json import STRICT
from whet.chat.control_tokens import NO_TEXT
from whet.core.types import ToolCall

_DEEPEST = 64  # levels of lists and objects


def checked_call(found: Any, number: int) -> ToolCall:
    """A call from what a model wrote: a name with ``arguments`` (or ``parameters``), nested or not. Raises
    ``ValueError`` for anything else."""
    function = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("it is not an object with a name and arguments")
    return {
        "id": call_id(number),
        "type": "function",
        "function": {
            "name": _usable(function["name"]),
            "arguments": checked_arguments(function.get("arguments", function.get("parameters", {}))),
        },
    }


def call_id(number: int) -> str:
    """Return an id of nine letters and digits, as some templates ask for."""
    return f"call{number:05}"


def checked_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call, given as an object or as its JSON. Raises ``ValueError`` for anything else, and for what
    not every tool, file and template can take: deep nesting, numbers beyond floats, characters that don't exist."""
    try:
        found = STRICT.decode(arguments or "{}") if isinstance(arguments, str) else arguments
    except RecursionError as problem:
        raise ValueError(why(problem)) from None
    if not isinstance(found, dict):
        raise ValueError("its arguments are not an object")
    usable: dict[str, Any] = _usable(found)
    return usable


def _usable(value: Any, depth: int = 0) -> Any:
    """Return a JSON value. Raises ``ValueError`` where it can't be passed on."""
    if depth > _DEEPEST:
        raise ValueError(why(RecursionError()))
    if isinstance(value, str):
        if found := NO_TEXT.search(value):
            raise ValueError(f"it holds U+{ord(found[0]):X}, which is not a character of Unicode")
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("it holds a number that is too large")
    elif isinstance(value, dict):
        return {_usable(key, depth + 1): _usable(one, depth + 1) for key, one in value.items()}
    elif isinstance(value, list):
        return [_usable(one, depth + 1) for one in value]
    return value


def why(problem: Exception) -> str:
    """Return what is wrong with a call, in few words."""
    if isinstance(problem, json.JSONDecodeError):
        return f"it is not valid JSON: {problem.msg}"
    return "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:200]
