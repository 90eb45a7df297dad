"""The cache folder of converted models and downloaded files, and the offline setting."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of models: ``models`` in ``$WHET_CACHE``, by default in ``~/.cache/whet``."""
    return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet").expanduser() / "models"


def offline() -> bool:
    """Return whether downloads are forbidden, by the environment variables of Hugging Face's libraries."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
