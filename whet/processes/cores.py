"""How many cores this process may use, and which of them who gets."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.base.errors import ConfigError

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


def divide(learner: int | None, generator: int | None) -> tuple[list[int] | None, list[int] | None]:
    """The numbers of the cores of learner and generator, which share none. Where one number is not given, that side
    gets the others; where neither is, nobody is bound to any (None)."""
    if learner is None and generator is None:
        return None, None
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("devices.learner_cores and generator_cores need Linux; leave them out")
    there = sorted(os.sched_getaffinity(0))[: cores()]
    learner = len(there) - (generator or 0) if learner is None else learner
    generator = len(there) - learner if generator is None else generator
    if learner + generator > len(there) or min(learner, generator) < 1:
        raise ConfigError(
            f"devices.learner_cores = {learner} and devices.generator_cores = {generator} can't be met: this process "
            f"may use {len(there)} cores, and each of the two needs one at least; lower them, or leave them out"
        )
    return there[:learner], there[len(there) - generator :]


def part(cores: Sequence[int], number: int, of: int) -> list[int]:
    """The share of one of several that divide cores: disjoint where there are enough, else all of them.

    >>> part([4, 5, 6, 7], 1, 2)
    [6, 7]
    """
    each = len(cores) // of
    return list(cores[number * each : (number + 1) * each]) if each else list(cores)


def bind(cores: Sequence[int]) -> None:
    """This thread, and those that it starts from now on, run on these cores only."""
    os.sched_setaffinity(0, cores)


@contextmanager
def bound(cores: Sequence[int] | None) -> Iterator[None]:
    """The same while inside; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(cores)
    try:
        yield
    finally:
        bind(list(before))
