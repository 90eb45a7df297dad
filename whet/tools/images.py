"""Results of tools with images, of Pillow or of MCP's servers, as parts of a message."""

from typing import Any

from whet.core.content import Part
from whet.fetch.images import is_image, read_image


def parts_of(result: Any) -> list[Part] | None:
    """Return the parts of a result with images: an image of Pillow, or a list of such images and texts. None for any
    other result. Raises ``DataError`` for an image that is too large."""
    items = list(result) if isinstance(result, list | tuple) else [result]
    if not any(map(is_image, items)) or not all(is_image(item) or isinstance(item, str) for item in items):
        return None
    return [
        {"type": "text", "text": item} if isinstance(item, str) else {"type": "image", "url": read_image(item)}
        for item in items
    ]


def within(parts: list[Part], limit: int) -> list[Part]:
    """Return the parts with texts of at most ``limit`` characters in total, with a mark where they were cut."""
    kept: list[Part] = []
    for part in parts:
        if part["type"] == "text":
            text = part["text"][:limit]
            limit -= len(text)
            part = {"type": "text", "text": text if text == part["text"] else f"{text}\n[the rest is left out]"}
        kept.append(part)
    return kept
