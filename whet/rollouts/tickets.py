"""Tickets, of groups that are sampled, and permits for them: the staleness budget, which is also the backpressure on
sampling. A group of rollouts starts only with a permit; a step's permits return after new weights are published. With
``max_staleness`` n there are permits for n + 1 steps, so no rollout that reaches the learner was started more than n
versions ago."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from whet.base.errors import WhetError
from whet.base.strict_json import JsonObject
from whet.core.types import Episode, Group, Task


@dataclass(slots=True)
class Ticket:
    """One group: drawn, being sampled, or finished and not trained yet."""

    number: int
    task: int  # index into the task set
    version: int  # version of the weights when it was issued
    epoch: int | None = None  # None with a curriculum
    job: "asyncio.Task[None] | None" = None
    group: Group | None = None  # None until it is sampled
    finished: int = -1  # the number of groups that finished before it
    answers: int = 0  # episodes that have ended

    def uid(self, task: Task) -> str:
        """Return the name of its group."""
        return f"{self.number:07d}:{task.uid}"

    def state(self) -> JsonObject:
        """Return what a checkpoint keeps of it (JSON): its group if that is finished."""
        saved: JsonObject = {"number": self.number, "task": self.task, "version": self.version}
        episodes = None if self.group is None else [episode.to_json() for episode in self.group.episodes]
        return saved | {"epoch": self.epoch, "episodes": episodes}

    @classmethod
    def from_state(cls, saved: JsonObject, task: Task) -> "Ticket":
        """Return the ticket of a checkpoint."""
        ticket = cls(saved["number"], saved["task"], saved["version"], saved.get("epoch"))
        if saved["episodes"] is not None:
            ticket.group = Group(ticket.uid(task), task, [Episode.from_json(each) for each in saved["episodes"]])
        return ticket


class Permits:
    """A counter of permits. Only the source takes and returns them, in one asyncio task, so nothing ever waits here.

    >>> permits = Permits(per_step=2, max_staleness=0)
    >>> permits.take(), permits.take(), permits.take()
    (True, True, False)
    >>> permits.give_back(2); permits.take()
    True
    """

    def __init__(self, per_step: int, max_staleness: int) -> None:
        self.per_step, self.max_staleness = per_step, max_staleness
        self.available = per_step * (max_staleness + 1)
        self._total = self.available

    def take(self) -> bool:
        """Take a permit and return True, or return False if none is available."""
        if self.available <= 0:
            return False
        self.available -= 1
        return True

    def hold(self, count: int) -> None:
        """Mark permits as taken by the groups in flight of a resumed run, which may be more than there are permits
        now."""
        self.available -= count

    def give_back(self, count: int = 1) -> None:
        """Return permits: a step's after its weights are published, a dropped group's at once."""
        self.available += count
        if self.available > self._total:
            raise WhetError("more permits were given back than taken: a step was published twice")

    def in_time(self, begun: int, version: int, after: int) -> bool:
        """Return whether a group that was started under version ``begun`` meets the bound if ``after`` other groups are
        trained between it and the step after ``version`` (less than 0: it is part of that step).

        >>> permits = Permits(per_step=2, max_staleness=1)
        >>> permits.in_time(3, version=4, after=-1), permits.in_time(3, version=4, after=0)
        (True, False)
        """
        return version + after // self.per_step + 1 - begun <= self.max_staleness


def may_come_next(tickets: Iterable[Ticket], permits: Permits, version: int, left: int) -> list[Ticket]:
    """Return the oldest ticket, and each one that may overtake the older ones in time; the step after ``version`` needs
    ``left`` more groups."""
    ordered = sorted(tickets, key=lambda ticket: (ticket.version, ticket.number))
    can_wait = (permits.in_time(each.version, version, place - left + 1) for place, each in enumerate(ordered))
    return ordered[: 1 + len(list(takewhile(bool, can_wait)))]
