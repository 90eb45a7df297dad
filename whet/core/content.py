"""The content of a message: a text, or a list of parts. Parts of text alone are supported; an image is refused in
words, wherever a content is read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from whet.base.errors import DataError

if TYPE_CHECKING:
    from whet.core.types import Message


class TextPart(TypedDict):
    """A text in a content."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a content. Declared, and not supported yet."""

    type: Literal["image"]
    url: str


Part = TextPart | ImagePart
Content = str | list[Part]


def text_of(content: Content, where: str = "a message") -> str:
    """Return the content as text: its parts, joined. Raises ``DataError`` for a part that is not a text; ``where`` says
    which message it belongs to.

    >>> text_of([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
    '2 + 2?'
    """
    return content if isinstance(content, str) else "".join(_text(part, where) for part in content)


def in_text(messages: Sequence["Message"], where: str = "") -> list["Message"]:
    """Return the messages with each content as text. Raises ``DataError`` naming the message with a part that is not a
    text; ``where`` says what the messages belong to, as in ``" of task 17"``."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": text_of(message["content"], f"message {number}{where}")}
        for number, message in enumerate(messages, 1)
    ]


def content_of(value: object) -> Content:
    """Return a content as clients and data sets write it, where a part of text may have the type ``output_text``, say,
    or none. Raises ``ValueError`` for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts of text")
    parts: list[Part] = []
    for part in value:
        kind = _kind(part)
        match part:
            case {"text": str(text)} | {"refusal": str(text)} if kind.endswith(("text", "refusal", "None")):
                parts.append({"type": "text", "text": text})
            case _:
                why = " (images are not supported yet)" if "image" in kind else ""
                raise ValueError(f"must hold text only, not a part of type {kind!r}{why}")
    return parts


def _text(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image"}:
            raise DataError(f"images are not supported yet: {where} has a part of type 'image'")
    raise DataError(f"{where} has a part of type {_kind(part)!r}; a part must be {{'type': 'text', 'text': '...'}}")


def _kind(part: object) -> str:
    return str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
