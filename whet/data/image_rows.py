"""The images of a row, brought into its messages as parts with data URLs. A row has them

in parts of its messages       {"type": "image", "image": "cat.png"}, or OpenAI's and Anthropic's parts
in a column with placeholders  "images": ["cat.png"], and {"type": "image"} in the messages
in a column with marks         "images": ["cat.png"], and "<image>" in the texts of the user
in a column alone              "image": "cat.png": the images come before the first text of the user
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.base.strict_json import STRICT, JsonObject
from whet.core.content import ImagePart
from whet.data.files import without_bytes
from whet.fetch.images import read_image, source_of

_COLUMNS = ("images", "image")
_QUESTIONS = ("messages", "prompt")
_ANSWERS = ("completion", "chosen", "rejected")
_MARK = "<image>"
_PLACEHOLDER = {"type": "image"}


def with_images(fields: JsonObject, folder: Path | None) -> JsonObject:
    """Return the fields of a row with its images in the messages, without their column and without other values of
    bytes. ``folder``: see ``read_image``. Raises ``ValueError`` naming the field of an image that can't be read, and
    unless each image of the column has one place in the messages."""
    row, column = dict(fields), image_column(fields)
    sources = [] if column is None else _listed(row.pop(column))
    if sources and not any(_places(row.get(name)) for name in (*_QUESTIONS, *_ANSWERS)):
        _add_places(row, len(sources))
    asked = next((name for name in _QUESTIONS if row.get(name)), "")
    before = _places(row.get(asked))
    needed = {name: _places(row.get(name)) for name in _ANSWERS if name in row}
    # Answers that repeat the question have the places of all images; others have those after the question.
    start = {name: 0 if count == len(sources) else before for name, count in needed.items()}
    ends = {asked or "messages": before} | {name: start[name] + count for name, count in needed.items()}
    for name, places in ends.items():
        if places != len(sources) and (places == max(ends.values()) or (name in needed and not asked)):
            raise ValueError(f"field {name!r} has places for {places} images, and the row has {len(sources)}")
    urls = [_read(source, folder, f"{column}[{number}]") for number, source in enumerate(sources)]
    for name in (asked, *needed):
        if isinstance(row.get(name), list):
            following = iter(urls[start.get(name, 0) :])
            row[name] = [_filled(message, following, folder, f"{name}[{i}]") for i, message in enumerate(row[name])]
    return without_bytes(row)


def image_column(fields: Mapping[str, object]) -> str | None:
    """Return the name of the column with the images of a row; None without one."""
    return next((name for name in _COLUMNS if fields.get(name) not in (None, "", [])), None)


def data_part(part: Mapping[str, object]) -> ImagePart:
    """Return the part of an image that ``with_images`` has read. Raises ``ValueError`` for another one."""
    url = part.get("url")
    if part.get("type") != "image" or not isinstance(url, str) or not url.startswith("data:image/"):
        raise ValueError("must hold images as data URLs")
    return {"type": "image", "url": url}


def _listed(value: object) -> list[object]:
    if isinstance(value, str) and value.startswith("["):  # a table's text
        try:
            value = STRICT.decode(value)
        except ValueError:
            return [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _read(source: object, folder: Path | None, field: str) -> str:
    try:
        return read_image(source, folder)
    except DataError as problem:
        raise ValueError(f"field {field!r}: {problem}") from None


def _parts(messages: object) -> Iterator[Any]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else ()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and "image" in str(part.get("type"))


def _places(messages: object) -> int:
    """Return the number of placeholders, which the images of the column replace."""
    return sum(_is_image(part) and source_of(part) is None for part in _parts(messages))


def _filled(message: Any, urls: Iterator[str], folder: Path | None, field: str) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    parts = list(content)
    for number, part in enumerate(content):
        if _is_image(part):
            source = source_of(part)
            place = f"{field}.content[{number}]"
            url = next(urls) if source is None else _read(source, folder, place)
            parts[number] = {"type": "image", "url": url}
    return {**message, "content": parts}


def _add_places(row: JsonObject, count: int) -> None:
    """Put placeholders of the column's images into the question: at the marks, or before the first text."""
    asked = next((name for name in _QUESTIONS if row.get(name)), "")
    for name in (asked,) if asked else ("chosen", "rejected"):
        if isinstance(row.get(name), str):
            row[name] = [{"role": "user", "content": row[name]}]
        if not isinstance(row.get(name), list):
            continue  # a wrong field, which is named when the row is validated
        marks = sum(text.count(_MARK) for text in _texts(row[name]))
        if marks not in (0, count):
            raise ValueError(f"the texts of field {name!r} have {marks} marks {_MARK}, and the row has {count} images")
        if marks:
            row[name] = [_edited(message, _split) for message in row[name]]
        else:
            if any(map(_is_image, _parts(row[name]))):
                raise ValueError(
                    f"field {name!r} has images in its parts, and the row has {count} more in a column without places "
                    f'for them: leave the column out, or put {{"type": "image"}} or {_MARK} where each belongs'
                )
            first = next((i for i, message in enumerate(row[name]) if _by_user(message)), None)
            if first is None:
                raise ValueError(f"field {name!r} has no message of the user, to which the images of the row belong")
            added = [_edited(row[name][first], lambda parts: [*[_PLACEHOLDER] * count, *parts])]
            row[name] = [*row[name][:first], *added, *row[name][first + 1 :]]


def _by_user(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "user"


def _texts(messages: list[Any]) -> Iterator[str]:
    for message in filter(_by_user, messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _edited(message: Any, edit: Callable[[list[object]], list[object]]) -> object:
    """Return a message of the user with its parts edited, and another message unchanged."""
    if not _by_user(message):
        return message
    content = message.get("content")
    return {**message, "content": edit(content if isinstance(content, list) else [{"type": "text", "text": content}])}


def _split(parts: list[object]) -> list[object]:
    """Return the parts with a placeholder for each mark in their texts."""
    split = list[Any]()
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            split.append(part)
            continue
        for number, piece in enumerate(text.split(_MARK)):
            split += [_PLACEHOLDER] if number else []
            split += [{"type": "text", "text": piece}] if piece else []
    return split
