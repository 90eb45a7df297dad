"""Tools, calls and results as plain text in the format of Hermes, for chat templates that don't support them."""

import json
from collections.abc import Sequence

from whet.core.content import text_of
from whet.core.types import FunctionCall, Message

CALL, CALLED = "<tool_call>", "</tool_call>"
_BEFORE = "You may call functions. These are their signatures:\n<tools>\n"
_AFTER = (
    "\n</tools>\nFor each call, write a JSON object with the name and the arguments:\n"
    f'{CALL}\n{{"name": "the name", "arguments": {{}}}}\n{CALLED}'
)


def as_text(messages: Sequence[Message], tools: Sequence[dict[str, object]] | None) -> list[Message]:
    """Return the conversation with system, user and assistant messages only: the tools are in the system message, calls
    at the end of a reply, and consecutive results in one user message."""
    written: list[Message] = []
    for message, before in zip(messages, [None, *messages], strict=False):
        content = message["content"]
        if calls := message.get("tool_calls"):
            answer, texts = text_of(content), [_call(call.get("function", call)) for call in calls]
            content = "\n".join([answer, *texts] if answer else texts)
        if message["role"] != "tool":
            thought = {"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}
            written.append(Message(role=message["role"], content=content, **thought))  # type: ignore[typeddict-item]
            continue
        content = f"<tool_response>\n{text_of(content)}\n</tool_response>"
        if before is not None and before["role"] == "tool":
            content = f"{written.pop()['content']}\n{content}"
        written.append({"role": "user", "content": content})
    if tools:
        text = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
        leads = bool(written) and written[0]["role"] == "system"
        asked = f"{text_of(written.pop(0)['content'])}\n\n{text}" if leads else text
        written.insert(0, {"role": "system", "content": asked})
    return written


def _call(function: FunctionCall) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{CALL}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {text}}}\n{CALLED}'
