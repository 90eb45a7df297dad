"""The content of a message: a text, or a list of parts, each a text or an image. An image is refused in words wherever
only texts can be used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from typing_extensions import TypedDict

from whet.base.errors import DataError

if TYPE_CHECKING:
    from whet.core.types import Message


class TextPart(TypedDict):
    """A text in a content."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a content, for models with a vision tower (``model.vision``)."""

    type: Literal["image"]
    url: str  # a data URL (RFC 2397) of a PNG or JPEG file, "data:image/png;base64,..."


Part = TextPart | ImagePart
Content = str | list[Part]


def text_of(content: Content, where: str = "a message") -> str:
    """Return the content as text: its parts, joined. Raises ``DataError`` for a part that is not a text; ``where`` says
    which message it belongs to.

    >>> text_of([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
    '2 + 2?'
    """
    return content if isinstance(content, str) else "".join(_text(part, where) for part in content)


def words_of(content: Content) -> str:
    """Return the texts of the content, joined, without its images: what a grader, a search or a count reads.

    >>> words_of([{"type": "image", "url": "data:image/png;base64,"}, {"type": "text", "text": "How many?"}])
    'How many?'
    """
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def image_urls(messages: Iterable["Message"]) -> list[str]:
    """Return the data URLs of all images of the messages, in order."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return [part["url"] for part in parts if part["type"] == "image"]


def only_images(urls: Iterable[str]) -> list["Message"]:
    """Return the message of a user that consists of images."""
    return [{"role": "user", "content": [{"type": "image", "url": url} for url in urls]}]


def in_text(messages: Sequence["Message"], where: str = "") -> list["Message"]:
    """Return the messages with each content as text. Raises ``DataError`` naming the message with a part that is not a
    text; ``where`` says what the messages belong to, as in ``" of task 17"``."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": text_of(message["content"], f"message {number}{where}")}
        for number, message in enumerate(messages, 1)
    ]


def content_of(value: object, image: Callable[[Mapping[str, object]], ImagePart] | None = None) -> Content:
    """Return a content as clients and data sets write it, where a part of text may have the type ``output_text``, say,
    or none. ``image`` reads a part of an image; without it images are refused. Raises ``ValueError`` for anything
    else."""
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
            case Mapping() if image is not None and "image" in kind:
                parts.append(image(part))
            case _:
                what = "text only" if image is None else "texts and images only"
                raise ValueError(f"must hold {what}, not a part of type {kind!r}")
    return parts


def _text(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image"}:
            raise DataError(f"{where} has an image, where only text can be read; models read images by model.vision")
    raise DataError(f"{where} has a part of type {_kind(part)!r}; a part must be {{'type': 'text', 'text': '...'}}")


def _kind(part: object) -> str:
    return str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
