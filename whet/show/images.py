"""Images of messages as people see them: a label in a text, a thumbnail on a page."""

import base64
import io
from functools import lru_cache

from whet.base.errors import WhetError
from whet.core.content import Content
from whet.fetch.images import open_image

_MOST = 4  # thumbnails of a message
_EXTENT = 96  # pixels, the longer side of a thumbnail
_SMALL = 4_000  # bytes; larger thumbnails are JPEG


def shown(content: Content) -> str:
    """Return the content as text, with a label in the place of each image.

    >>> shown([{"type": "image", "url": "images/lost.png"}, {"type": "text", "text": "How many?"}])
    '[image]\\nHow many?'
    """
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"{label(part['url'])}\n" for part in content)


@lru_cache(maxsize=256)
def label(url: str) -> str:
    """Return the words for an image with its size in pixels, without the size if it can't be read."""
    try:
        width, height = open_image(url).size
    except WhetError:
        return "[image]"
    return f"[image {width} x {height}]"


def thumbnails(content: Content) -> list[str]:
    """Return the data URLs of thumbnails of the first images in a content, each of a few kilobytes."""
    parts = content if isinstance(content, list) else []
    urls = [part["url"] for part in parts if part["type"] == "image"]
    return [small for url in urls[:_MOST] if (small := _thumbnail(url))]


@lru_cache(maxsize=256)
def _thumbnail(url: str) -> str:
    """Return the data URL of a thumbnail; an empty text for an image that can't be read, also without Pillow."""
    try:
        image = open_image(url)
    except WhetError:
        return ""
    image = image.convert("RGB")
    image.thumbnail((_EXTENT, _EXTENT))
    for kind, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": 75})):
        file = io.BytesIO()
        image.save(file, kind, **options)
        if len(file.getvalue()) <= _SMALL:
            break
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
