"""Memory that a process keeps between two steps.

glibc gives every large block back to the system when it is freed, and the system hands out each page anew, zeroed, at
the next one: on a CPU that is a third of the time of a learning step. A process that computes frees and takes the same
gigabytes again and again, so it keeps them. Its peak stays what it was; between steps it holds as much as at its peak.
"""

import ctypes
import sys

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """From now on all threads take memory from one heap, and what is freed there stays. To be called before any
    thread is started: one that has a heap already keeps it, and leaves it to the next. Does nothing without glibc."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)  # any other arena is made of pieces of 64 MiB, which are given back
    libc.mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, too
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
