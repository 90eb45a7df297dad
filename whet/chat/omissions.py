"""The parts of a conversation that a chat template leaves out."""

import contextlib
from collections.abc import Sequence

from whet.base.errors import DataError
from whet.chat.chat_template import ChatTemplate
from whet.core.content import words_of
from whet.core.types import Message

_EVERYWHERE = ("system", "user", "assistant")  # roles that every template supports


def left_out(
    chat: ChatTemplate, messages: Sequence[Message], tools: list[dict[str, object]] | None = None
) -> str | None:
    """Return the part of a conversation that the template omits: the tools, the tool calls of a reply, or a message
    of a role other than system, user and assistant. None if it omits nothing."""
    messages = [message | {"content": words_of(message["content"])} for message in messages]
    messages, tools = chat.written(messages, tools)
    if not tools and all(message["role"] in _EVERYWHERE and not message.get("tool_calls") for message in messages):
        return None
    whole = chat.apply(messages, tools)
    if tools and chat.apply(messages) == whole:
        return "the tools"
    for index, message in enumerate(messages):
        without: list[Message] = [*messages]
        what = "the tool calls of a reply"
        if message.get("tool_calls"):
            without[index] = {"role": "assistant", "content": message["content"]}
        elif message["role"] not in _EVERYWHERE:
            without[index] = {**message, "content": words_of(message["content"]) + "x"}
            what = f"a message of the role {message['role']!r}"
        else:
            continue
        with contextlib.suppress(DataError):  # the changed conversation can't be rendered, so the part is needed
            if chat.apply(without, tools) == whole:
                return what
    return None
