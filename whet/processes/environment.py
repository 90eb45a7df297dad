"""Environment variables for processes that are started by somebody else's code, which takes this process's own."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_LOCK = threading.Lock()  # it belongs to the whole process


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside; afterwards this process goes back to its own."""
    with _LOCK:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
