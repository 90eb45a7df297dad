"""whet: sharpen a language model after pretraining. Start with ``whet train quickstart``, or from Python with
``whet.start("quickstart")``."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.api import open, read, result, resume, start, train

__version__ = "0.1.0"
__all__ = ["open", "read", "result", "resume", "start", "train"]

# GNU's OpenMP reads this variable when torch is imported. A thread that waits for another one spins first, by default
# for milliseconds: where other programs use the same cores, it would take the time that the other thread needs.
SPINS = "5000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def __getattr__(name: str) -> Any:
    """Import the Python API when it is used: reading a version or a recipe takes none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    from whet import api

    return getattr(api, name)
