"""Thoughts: the text between ``<think>`` and ``</think>`` at the beginning of a reply."""

from whet.core.content import text_of
from whet.core.types import Message

OPEN, CLOSE = "<think>", "</think>"


def is_open(text: str) -> bool:
    """Return whether thoughts have started but not ended."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends in the ``<think>`` of the reply."""
    return prompt.rstrip().endswith(OPEN)


def split_text(text: str, opened: bool = False) -> tuple[str | None, str]:
    """Return the thought at the beginning of a reply, or None, and the rest. ``opened``: the prompt ends with
    ``<think>``. A thought without an end is the whole text.

    >>> split_text("<think>\\nEasy.\\n</think>\\n\\n4")
    ('Easy.', '4')
    >>> split_text("4")
    (None, '4')
    """
    starts = text.lstrip().startswith(OPEN)
    if not (starts or opened):
        return None, text
    thought, _, answer = (text.lstrip().removeprefix(OPEN) if starts else text).partition(CLOSE)
    return thought.strip("\n"), answer.lstrip("\n")


def split_thinking(message: Message) -> Message:
    """Return the message with the thought at the beginning of its text moved to ``reasoning_content``, unless it has
    that field already."""
    thought, answer = split_text(text_of(message["content"]))
    if "reasoning_content" in message or thought is None:
        return message
    return message | {"content": answer, "reasoning_content": thought}


def with_thought(message: Message) -> Message:
    """Return the message with its thought written at the beginning of its text."""
    if not (thought := message.get("reasoning_content")):
        return message
    content = f"{OPEN}\n{thought}\n{CLOSE}\n\n{text_of(message['content'])}"
    return message | {"content": content, "reasoning_content": ""}
