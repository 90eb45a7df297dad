"""The messages of a row, checked field by field: whatever is missing, of another type or in the wrong order is a
``DataError`` that names the row and the field. Knows no tokenizer."""

from itertools import pairwise, takewhile
from typing import Any, cast

from whet.data.jsonl import Row, is_unicode
from whet.types import Message


def supervised_messages(row: Row) -> tuple[list[Message], str]:
    """The conversation, and the field that its last message stands in."""
    if "messages" in row.values:
        return _conversation(row, "messages", _messages(row, "messages", "user")), "messages"
    messages = _messages(row, "prompt", "user") + _messages(row, "completion", "assistant")
    return _conversation(row, "completion", messages), "completion"


def _conversation(row: Row, name: str, messages: list[Message]) -> list[Message]:
    """The messages, once it is clear that they begin with something to reply to, end with a reply, and never hold two
    replies in a row."""
    tools_of(row)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or replies[-1] != len(messages) - 1:
        raise row.problem(name, "must end with a reply of the assistant", row.values[name])
    if replies[0] == 0:
        raise row.problem(name, "must have a message before the first reply", row.values[name])
    if any(after == before + 1 for before, after in pairwise(replies)):
        raise row.problem(name, "must not hold two replies in a row", row.values[name])
    return messages


def preference_messages(row: Row) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, chosen and rejected answer. Without a prompt of its own, a row's is what both answers begin with."""
    chosen, rejected = _messages(row, "chosen", "assistant"), _messages(row, "rejected", "assistant")
    prompt = _messages(row, "prompt", "user") if "prompt" in row.values else []
    if prompt and chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        prompt = [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise row.problem(name, "must hold an answer after the prompt", row.values[name])
    _conversation(row, "chosen", prompt + chosen)
    _conversation(row, "rejected", prompt + rejected)
    return prompt, chosen, rejected


def _messages(row: Row, name: str, role: str) -> list[Message]:
    """A field as messages; a text is one message of the role."""
    value = row.values.get(name)
    if isinstance(value, str):
        return [{"role": role, "content": row.text(name)}]
    if not isinstance(value, list) or not value:
        raise row.problem(name, "must be a text or a list of messages that is not empty", value)
    return [_message(row, name, message) for message in value]


def _message(row: Row, name: str, value: Any) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise row.problem(name, "must hold messages with a 'role' and a 'content'", value)
    calls = value.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise row.problem(name, "must hold 'tool_calls' that are a list of calls with the name of a function", calls)
    content = value.get("content")
    if content is None and calls:
        content = ""  # as the OpenAI API has it for a reply that only calls tools
    if not isinstance(content, str) or not is_unicode(content):
        raise row.problem(name, "must hold messages whose 'content' is a text", value)
    if value["role"] == "assistant" and not content.strip() and not calls:
        raise row.problem(name, "must not hold an empty reply", value)
    message = {key: part for key, part in value.items() if key != "tool_calls" or calls}
    return cast(Message, message | {"content": content})


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """The tools that the row offers. Raises ``DataError`` for anything but a list of objects."""
    tools = row.values.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise row.problem("tools", "must be a list of objects, each describing a tool", tools)
    return tools or None
