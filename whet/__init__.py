"""whet: sharpen a language model after pretraining. Start with ``whet train quickstart``, or from Python with
``whet.start("quickstart")``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.api import open, read, result, resume, start, train

__version__ = "0.1.0"
__all__ = ["open", "read", "result", "resume", "start", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python API when it is used: reading a version or a recipe takes none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    from whet import api

    return getattr(api, name)
