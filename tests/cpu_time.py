"""Bounds on how long something computes that hold on a busy machine, too: they count CPU seconds, not the clock's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_seconds_below(most: float) -> Iterator[None]:
    """The block takes less than this CPU time of the process. Give at least five times the time on a free core."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < most
