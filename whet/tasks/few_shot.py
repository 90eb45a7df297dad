"""The first messages of a task: a system message, solved examples, and the question."""

from collections.abc import Sequence

from whet.config import Config
from whet.core.types import Message


class Example(Config):
    """A question with the reply that the model is shown for it."""

    question: str
    answer: str


def messages(system: str | None, user: str, examples: Sequence[Example] = ()) -> list[Message]:
    """Return the messages of a prompt: the examples are earlier turns of the conversation."""
    conversation: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for example in examples:
        conversation.append({"role": "user", "content": example.question})
        conversation.append({"role": "assistant", "content": example.answer})
    return [*conversation, {"role": "user", "content": user}]
