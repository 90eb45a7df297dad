"""What an environment says between two replies, made to fit."""

from collections.abc import Sequence

from whet.data.renderer import Renderer
from whet.errors import DataError
from whet.types import Message


def shorten(
    messages: Sequence[Message], history: Sequence[int], renderer: Renderer, limit: int
) -> tuple[list[int], list[Message]]:
    """The tokens that the messages add to ``history``, at most ``limit``, and the messages as they are then: the
    longest ones lose their middle, and say so. Raises ``DataError`` where that isn't enough."""
    texts = [message["content"] for message in messages]
    kept = [len(text) for text in texts]
    while True:
        shown = [
            message | {"content": _ends(text, size)} for message, text, size in zip(messages, texts, kept, strict=True)
        ]
        tokens = renderer.render_next(history, shown)
        if len(tokens) <= limit:
            return tokens, shown
        longest = max(range(len(kept)), key=kept.__getitem__, default=0)
        if not any(kept):
            raise DataError(
                f"what the chat template writes between two replies has {len(tokens)} tokens, more than "
                f"sampling.max_observation_tokens = {limit}; raise it"
            )
        kept[longest] = int(kept[longest] * max(0.5, 0.95 * limit / len(tokens)))


def _ends(text: str, size: int) -> str:
    """The first and last characters, ``size`` together.

    >>> _ends("abcdefghij", 4)
    'ab\\n[6 characters left out]\\nij'
    """
    if size >= len(text):
        return text
    first = size // 2
    return f"{text[:first]}\n[{len(text) - size:,} characters left out]\n{text[len(text) - size + first :]}"
