"""Shortens the messages of an environment between two replies to a token limit. Images stay: only texts are cut."""

from collections.abc import Sequence

from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.content import Content, Part, image_urls, text_of
from whet.core.types import Message

_CHARACTERS = 8  # upper estimate of the characters per token, which limits the search
_CLOSE = 16  # the search stops at a relative precision of one part in this


def shorten(
    messages: Sequence[Message], history: Sequence[int], renderer: Renderer, limit: int
) -> tuple[list[int], list[Message]] | None:
    """Return the tokens that the messages add to ``history``, at most ``limit``, and the messages as shortened: the
    middle of the longest ones is replaced by a note. Return None if there are too many messages to fit. Raises
    ``DataError`` if not even a single empty message fits."""
    if not renderer.longer_than(limit, messages):
        tokens = renderer.render_next(history, messages)
        if len(tokens) <= limit:
            return tokens, list(messages)
    contents = [message["content"] if image_urls([message]) else text_of(message["content"]) for message in messages]
    texts = [text for content in contents for text in _texts(content)]
    fits, most = None, max(map(len, texts), default=0)
    while most and sum(min(len(text), most) for text in texts) > _CHARACTERS * limit:
        most //= 2
    low, high = 0, most
    while fits is None or high - low > low // _CLOSE:
        size = (low + high) // 2 if high else 0
        shown = [
            message | {"content": _cut(content, size)} for message, content in zip(messages, contents, strict=True)
        ]
        tokens = [] if renderer.longer_than(limit, shown) else renderer.render_next(history, shown)
        if tokens and len(tokens) <= limit:
            fits, low = (tokens, shown), size + 1
        else:
            high = size - 1
        if low > high:
            break
    if fits is None:
        empty = [message | {"content": _without_texts(message["content"])} for message in messages[:1]]
        least = renderer.render_next(history, empty)
        if len(least) > limit:
            raise DataError(
                f"the chat template alone adds {len(least)} tokens between two replies, more than "
                f"sampling.max_observation_tokens = {limit}; raise it"
            )
    return fits


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _cut(content: Content, size: int) -> Content:
    """Return the content with at most ``size`` characters of each of its texts."""
    if isinstance(content, str):
        return _ends(content, size)
    parts: list[Part] = []
    for part in content:
        parts.append({"type": "text", "text": _ends(part["text"], size)} if part["type"] == "text" else part)
    return parts


def _without_texts(content: Content) -> Content:
    return "" if isinstance(content, str) else [part for part in content if part["type"] == "image"]


def _ends(text: str, size: int) -> str:
    """Return the first and last characters, ``size`` together, with a note between them, if that is shorter than the
    text.

    >>> _ends("abcdefghijklmnopqrstuvwxyz, and all of it again", 4)
    'ab\\n[43 characters left out]\\nin'
    """
    first = size // 2
    cut = f"{text[:first]}\n[{len(text) - size:,} characters left out]\n{text[len(text) - size + first :]}"
    return cut if size < len(text) and len(cut) < len(text) else text
