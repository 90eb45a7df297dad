"""Replies of gpt-oss, in the format that OpenAI calls Harmony: a reply is a series of messages, each with a channel.

<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from whet.base.strict_json import STRICT
from whet.chat.calls import checked_call, why
from whet.chat.notations.parts import MOST
from whet.core.types import Message, ToolCall

_NEXT, _TEXT = "<|start|>assistant", "<|message|>"
_END = re.compile(r"(?:<\|(?:end|call|return)\|>\s*)+\Z")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyReplies:
    """The format of replies in messages with channels."""

    def parse(self, text: str, tools: Sequence[dict[str, object]] | None = None) -> Message:
        """Return the message of a text: ``analysis`` is its thought, a message to ``functions.NAME`` a call, and the
        rest its text. Never raises."""
        thoughts, texts, calls, errors = list[str](), list[str](), list[ToolCall](), list[str]()
        for part in text.removeprefix(_NEXT).split(_NEXT):
            header, begins, body = part.partition(_TEXT)
            body = _END.sub("", body)
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if not begins:
                texts.append(part)
            elif recipient:
                try:
                    if len(calls) == MOST:
                        raise ValueError(f"only the first {MOST} calls of a reply are read")
                    calls.append(_call(recipient[1], body, len(calls)))
                except ValueError as problem:
                    errors.append(why(problem))
                    texts.append(part)
            else:
                (thoughts if channel and channel[1] == "analysis" else texts).append(body)
        reply: Message = {"role": "assistant", "content": "\n\n".join(filter(None, texts))}
        if thoughts:
            reply["reasoning_content"] = "\n\n".join(thoughts)
        if calls:
            reply["tool_calls"] = calls
        if errors:
            reply["malformed_calls"] = errors
        return reply


def _call(recipient: str, body: str, number: int) -> ToolCall:
    kind, _, name = recipient.partition(".")
    if kind != "functions" or not name:
        raise ValueError(f"it is sent to {recipient}, which is not one of the functions")
    return checked_call({"name": name, "arguments": STRICT.decode(body) if body.strip() else {}}, number)
