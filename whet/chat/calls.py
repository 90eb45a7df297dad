"""Tool calls in the nested form of the OpenAI API, with arguments as an object, and their validation."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from whet.base.strict_json import STRICT, JsonObject
from whet.chat.control_tokens import NO_TEXT
from whet.core.types import Message, ToolCall

_DEEPEST = 64  # most levels of lists and objects
_ID = re.compile(r"[A-Za-z0-9]{9}|functions\.[\w.-]{1,200}:\d{1,6}")  # as Mistral and Kimi write it
_COUNTED = re.compile(r"call(\d{5})")


def checked_call(value: object, number: int) -> ToolCall:
    """Return a call from a JSON value of a model: a name with ``arguments`` or ``parameters``, nested or not. It keeps
    an id that the model wrote, if templates can write it. Raises ``ValueError`` for anything else."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("it is not an object with a name and arguments")
    written = value.get("id")
    return {
        "id": written if isinstance(written, str) and _ID.fullmatch(written) else call_id(number),
        "type": "function",
        "function": {
            "name": _usable(function["name"]),
            "arguments": checked_arguments(function.get("arguments", function.get("parameters", {}))),
        },
    }


def call_id(number: int) -> str:
    """Return an id of nine letters and digits, as some templates require."""
    return f"call{number:05}"


def counted(id: str) -> int | None:
    """Return the number of an id of ``call_id``; None for other ids."""
    match = _COUNTED.fullmatch(id)
    return int(match[1]) if match else None


def match_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an id for each call, and the id and the name of the call in each result, which clients
    and data sets often leave out. Results without an id follow the order of the calls."""
    matched, calls, count = list[Message](), dict[str, str](), 0
    waiting = list[str]()  # ids of calls without a result
    for message in messages:
        if made := message.get("tool_calls"):
            made = [{**call, "id": call.get("id") or call_id(count + number)} for number, call in enumerate(made)]
            message, count = message | {"tool_calls": made}, count + len(made)
            calls |= {call["id"]: call["function"]["name"] for call in made}
            waiting = [call["id"] for call in made]
        elif message["role"] == "tool":
            id = message.get("tool_call_id") or (waiting[0] if waiting else "")
            waiting = [other for other in waiting if other != id]
            if id in calls:
                message = message | {"tool_call_id": id, "name": calls[id]}
        matched.append(message)
    return matched


def checked_arguments(arguments: object) -> JsonObject:
    """Return the arguments of a call, given as an object or as its JSON. Raises ``ValueError`` for anything else, and
    for values that some tools, files or templates can't represent: deep nesting, numbers larger than floats, and
    characters outside Unicode."""
    value = STRICT.decode(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        raise ValueError("its arguments are not an object")
    usable: JsonObject = _usable(value)
    return usable


def _usable(value: object, depth: int = 0) -> Any:
    """Return the JSON value. Raises ``ValueError`` for a value that can't be represented everywhere."""
    if depth > _DEEPEST:
        raise ValueError(why(RecursionError()))
    if isinstance(value, str):
        if invalid := NO_TEXT.search(value):
            raise ValueError(f"it contains U+{ord(invalid[0]):X}, which is not a character of Unicode")
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("it contains a number that is too large")
    elif isinstance(value, dict):
        return {_usable(key, depth + 1): _usable(item, depth + 1) for key, item in value.items()}
    elif isinstance(value, list):
        return [_usable(item, depth + 1) for item in value]
    return value


def why(problem: Exception) -> str:
    """Return a short description of an error in a call."""
    if isinstance(problem, json.JSONDecodeError):
        return f"it is not valid JSON: {problem.msg}"
    return "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:200]
