"""A reply in its parts: the thought, the text, and the calls of tools.

What looks like a call and can't be read as one stays in the text, and ``malformed_calls`` says why. No text, however
odd, raises. Knows no tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whet.base.errors import ConfigError
from whet.chat.call_formats import MOST, CallFormat
from whet.chat.calls import checked_call, why
from whet.chat.thinking import split_text
from whet.core.types import Message

_LONGEST, _BLANK = 400_000, re.compile(r"\s{1000}")  # seconds of somebody's regular expressions, at the worst


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes replies."""

    calls: CallFormat | None = None
    thinks: bool = False  # between <think> and </think>
    opened: bool = False  # the prompt has written the <think>

    def parse(self, text: str, tools: Sequence[dict[str, Any]] | None = None) -> Message:
        """Return the message that a text spells. ``tools``, as far as they are known, say of which types arguments are
        that a format writes without quotes. Never raises."""
        thought, said = split_text(text, self.opened) if self.thinks else (None, text)
        reply: Message = {"role": "assistant", "content": said}
        if thought is not None:
            reply["reasoning_content"] = thought
        if self.calls is None:
            return reply
        found = self.calls.read(said, tools)
        reply["content"] = found.said
        if found.calls:
            reply["tool_calls"] = found.calls
        if found.wrong:
            reply["malformed_calls"] = found.wrong
        return reply


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """How a model writes replies, as its tokenizer says (``response_template`` of transformers). Raises ``ConfigError``
    for one that transformers doesn't take."""

    template: dict[str, Any]
    prompt: str  # ends where a reply begins

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing import parse_response

        try:
            parse_response("", self.template, prefix=self.prompt)
        except (ValueError, TypeError) as problem:
            raise ConfigError(f"the tokenizer's response_template can't be used: {problem}") from None

    def parse(self, text: str, tools: Sequence[dict[str, Any]] | None = None) -> Message:
        """Return the message that a text spells. Never raises."""
        from transformers.utils.chat_parsing import parse_response

        try:
            if len(text) > _LONGEST or _BLANK.search(text):
                raise ValueError("it stands in a reply that is too long, or has too many blanks in a row, to be read")
            found = parse_response(text, self.template, prefix=self.prompt)
            calls = [checked_call(call, number) for number, call in enumerate(found.get("tool_calls") or [])][:MOST]
        except Exception as problem:  # whatever a text does to somebody's regular expressions
            return {"role": "assistant", "content": text, "malformed_calls": [why(problem)]}
        reply: Message = {"role": "assistant", "content": str(found.get("content", ""))}
        if thought := found.get("thinking") or found.get("reasoning_content"):
            reply["reasoning_content"] = str(thought)
        if calls:
            reply["tool_calls"] = calls
        return reply
