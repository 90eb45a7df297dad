"""How many cores this process may use."""

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, as cgroup v2 writes it: "QUOTA PERIOD" or "max PERIOD"


def cores() -> int:
    """Those that it may run on and, where a container limits its time on them, whole cores' worth of that time."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return there
    return max(1, min(there, quota // period))


def divided_cores(ranks: int) -> int:
    """Threads for each of so many ranks on this machine."""
    return max(1, cores() // ranks)
