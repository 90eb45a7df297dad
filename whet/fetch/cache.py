"""The folder in which converted models and downloaded files are kept, and whether anything may be downloaded."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where models are kept: ``$WHET_CACHE``, else ``~/.cache/whet``; below it ``models``."""
    return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet").expanduser() / "models"


def offline() -> bool:
    """Return whether downloads are forbidden, by the variables that Hugging Face's libraries obey."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
