"""Bounds on how long something computes that hold on a busy machine, too: they count CPU seconds, not the clock's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from resource import RUSAGE_CHILDREN, getrusage


@contextmanager
def cpu_seconds_below(most: float) -> Iterator[None]:
    """The block takes less than this CPU time of the process. Give at least five times the time on a free core."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < most


@contextmanager
def childrens_cpu_seconds_below(most: float) -> Iterator[None]:
    """The same for the child processes that are started and waited for inside."""
    begun = _of_children()
    yield
    assert _of_children() - begun < most


def _of_children() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
