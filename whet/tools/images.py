"""Images in the results of tools: of Pillow, or of MCP's servers."""

import base64
import io
import sys
from typing import TYPE_CHECKING, Any

from whet.core.content import ImagePart, Part

if TYPE_CHECKING:
    from PIL.Image import Image


def parts_of(result: Any) -> list[Any] | None:
    """Return the parts of a result with images: an image of Pillow, or a list of such images and texts. None for any
    other result, without an import of Pillow."""
    items = list(result) if isinstance(result, list | tuple) else [result]
    if not any(map(_is_image, items)) or not all(_is_image(item) or isinstance(item, str) for item in items):
        return None
    return [image_part(item) if _is_image(item) else {"type": "text", "text": item} for item in items]


def image_part(image: "Image") -> ImagePart:
    """Return the part of an image of Pillow, as PNG."""
    file = io.BytesIO()
    (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")).save(file, "PNG")
    return {"type": "image", "url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}


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


def _is_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
