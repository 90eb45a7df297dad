"""Errors of allocators, of a GPU or of the system, as errors that say what was done and what would take less memory.
Imports no torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from whet.base.errors import OutOfMemoryError

_LACKS = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
_AMOUNTS = re.compile(
    r"tried to allocate [\d.]+ \w+|GPU \d+ has a total capacity of .*? is free|[\d.]+ \w+ is reserved by PyTorch but "
    r"unallocated",
    re.IGNORECASE,
)


def lack_of_memory(error: BaseException) -> str | None:
    """Return the amounts that an allocator names, in parentheses, or an empty text if it names none; None for another
    error."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and _LACKS.search(text)):
        return None
    amounts = "; ".join(_AMOUNTS.findall(text))
    return f" ({amounts[:1].lower()}{amounts[1:]})" if amounts else ""


@contextmanager
def naming_memory(doing: str, advice: str) -> Iterator[None]:
    """Raise ``OutOfMemoryError`` if the block gets no memory: while ``doing`` what, and the ``advice``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        amounts = lack_of_memory(error)
        if amounts is None:
            raise
        raise OutOfMemoryError(f"out of memory while {doing}{amounts}: {advice}") from error
