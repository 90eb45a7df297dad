"""Parsing of replies into thought, text and tool calls.

A text that looks like a call but can't be parsed stays in the text, and ``malformed_calls`` gives the reason. Parsing
never raises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject
from whet.chat.call_formats import CallFormat
from whet.chat.calls import checked_call, why
from whet.chat.notations.parts import MOST
from whet.chat.thinking import Marks, split_text
from whet.core.types import Message

# Limits of replies for a response_template, whose regular expressions may take seconds: characters, and white space.
_LONGEST, _BLANK = 400_000, re.compile(r"\s{1000}")


class Replies(Protocol):
    """The format of a model's replies."""

    def parse(self, text: str, tools: Sequence[JsonObject] | None = None) -> Message:
        """Return the message of a text. The schemas of ``tools`` determine the types of arguments that a format writes
        without quotes. Never raises."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Replies that are a thought, a text and calls."""

    calls: CallFormat | None = None
    thoughts: Marks | None = None  # around the thought at the beginning of a reply
    opened: bool = False  # the prompt ends with the opening mark

    def parse(self, text: str, tools: Sequence[dict[str, object]] | None = None) -> Message:
        """See ``Replies``."""
        thought, answer = split_text(text, self.opened, self.thoughts) if self.thoughts else (None, text)
        reply: Message = {"role": "assistant", "content": answer}
        if thought is not None:
            reply["reasoning_content"] = thought
        if self.calls is None:
            return reply
        parts = self.calls.read(answer, tools)
        reply["content"] = parts.text
        if parts.calls:
            reply["tool_calls"] = parts.calls
        if parts.errors:
            reply["malformed_calls"] = parts.errors
        return reply


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """Replies by the tokenizer's ``response_template`` (transformers). Raises ``ConfigError`` for a template that
    transformers rejects."""

    template: JsonObject
    prompt: str  # a rendered prompt, up to the reply

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing import parse_response

        try:
            parse_response("", self.template, prefix=self.prompt)
        except (ValueError, TypeError) as problem:
            raise ConfigError(f"the tokenizer's response_template can't be used: {problem}") from None

    def parse(self, text: str, tools: Sequence[JsonObject] | None = None) -> Message:
        """See ``Replies``."""
        from transformers.utils.chat_parsing import parse_response

        try:
            if len(text) > _LONGEST or _BLANK.search(text):
                raise ValueError("the reply is too long, or has too much white space in a row, to be parsed")
            parts = parse_response(text, self.template, prefix=self.prompt)
            calls = [checked_call(call, number) for number, call in enumerate(parts.get("tool_calls") or [])][:MOST]
        except Exception as problem:  # the model's text may break the template's regular expressions in many ways
            return {"role": "assistant", "content": text, "malformed_calls": [why(problem)]}
        reply: Message = {"role": "assistant", "content": str(parts.get("content", ""))}
        if thought := parts.get("thinking") or parts.get("reasoning_content"):
            reply["reasoning_content"] = str(thought)
        if calls:
            reply["tool_calls"] = calls
        return reply
