"""How long a conversation is, found before it is rendered: what is far too long must not hold up everything else."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from whet.chat.thinking import CLOSE
from whet.core.content import text_of
from whet.core.types import Message

_QUICK, _DENSEST = 8, 64  # characters of a token: below, rendering is quick; above, no text is so dense
_PIECE = 8192  # characters that are counted at once
_CUT = 2  # tokens that cutting a text may add


def longer_than(
    limit: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, count: Callable[[str], int]
) -> bool:
    """Return whether a conversation surely has more than ``limit`` tokens; what takes no time to render isn't counted.
    ``count`` gives the tokens of a text, and is asked for no more than about ``limit`` of them."""
    characters = sum(len(text) for text in _texts(messages, tools))
    if characters <= _QUICK * limit and len(messages) <= limit:
        return False
    if characters > _DENSEST * limit:
        return True
    found = len(messages)  # each has a mark at least
    for text in _surely_written(messages, tools):
        for start in range(0, len(text), _PIECE):
            found += max(0, count(text[start : start + _PIECE]) - _CUT)
            if found > limit:
                return True
    return found > limit


def _texts(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    for message in messages:
        yield text_of(message["content"])
        yield message.get("reasoning_content", "")
    yield from _calls(messages, tools)


def _surely_written(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    """The texts without what templates leave out: the thoughts of earlier replies, and white space around a text."""
    for message in messages:
        content = text_of(message["content"])
        yield (content.rpartition(CLOSE)[2] if message["role"] == "assistant" else content).strip()
    yield from _calls(messages, tools)


def _calls(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield json.dumps(call.get("function", call), ensure_ascii=False)
    for tool in tools or ():
        yield json.dumps(tool, ensure_ascii=False)
