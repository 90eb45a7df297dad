"""A lower bound of a conversation's length before it is rendered: rendering one that is far too long takes too long."""

import json
from collections.abc import Callable, Iterator, Sequence

from whet.chat.thinking import CLOSE
from whet.core.content import words_of
from whet.core.types import Message

_QUICK = 8  # characters per token of the limit up to which rendering is quick
_DENSEST = 64  # most characters per token in any text
_PIECE = 8192  # characters that are tokenised at once
_CUT = 2  # most tokens that cutting a text adds


def longer_than(
    limit: int, messages: Sequence[Message], tools: Sequence[dict[str, object]] | None, count: Callable[[str], int]
) -> bool:
    """Return whether a conversation certainly has more than ``limit`` tokens; False if it is quick to render. ``count``
    returns the number of tokens in a text; it is called for about ``limit`` tokens at most."""
    characters = sum(len(text) for text in _texts(messages, tools))
    if characters <= _QUICK * limit and len(messages) <= limit:
        return False
    if characters > _DENSEST * limit:
        return True
    tokens = len(messages)  # the template writes at least a mark for each
    for text in _written_texts(messages, tools):
        for start in range(0, len(text), _PIECE):
            tokens += max(0, count(text[start : start + _PIECE]) - _CUT)
            if tokens > limit:
                return True
    return tokens > limit


def _texts(messages: Sequence[Message], tools: Sequence[dict[str, object]] | None) -> Iterator[str]:
    for message in messages:
        yield words_of(message["content"])
        yield message.get("reasoning_content", "")
    yield from _calls(messages, tools)


def _written_texts(messages: Sequence[Message], tools: Sequence[dict[str, object]] | None) -> Iterator[str]:
    """Yield the texts that every template writes: no thoughts of earlier replies, no white space around a text."""
    for message in messages:
        content = words_of(message["content"])
        yield (content.rpartition(CLOSE)[2] if message["role"] == "assistant" else content).strip()
    yield from _calls(messages, tools)


def _calls(messages: Sequence[Message], tools: Sequence[dict[str, object]] | None) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield json.dumps(call.get("function", call), ensure_ascii=False)
    for tool in tools or ():
        yield json.dumps(tool, ensure_ascii=False)
