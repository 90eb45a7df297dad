"""A tiny model that reads images, and pictures to read."""

import base64
import io
from pathlib import Path

from PIL import Image
from safetensors.torch import load_file, save_file

from whet.core.types import Message
from whet.models.tiny_vision import save_tiny_vision_model


def picture(color: str | tuple[int, int, int] = "red", width: int = 40, height: int = 20) -> str:
    """Return the data URL of a picture with one colour on the left."""
    image = Image.new("RGB", (width, height), "white")
    image.paste(color, (0, 0, width // 2, height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asked(*urls: str, text: str = "Which colour?") -> Message:
    """Return a question about pictures."""
    return {
        "role": "user",
        "content": [*({"type": "image", "url": url} for url in urls), {"type": "text", "text": text}],
    }


def save_tiny_vision(folder: Path, split: bool = False) -> None:
    """Write a tiny model with 4 features for an image (``split``: and for each of its tiles) to a folder."""
    save_tiny_vision_model(folder, width=32, layers=2, pixels=32, tiles=split)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "connector" in name:
            weights[name] *= 30  # so that images matter among embeddings
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
