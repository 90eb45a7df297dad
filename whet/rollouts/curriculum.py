"""Which task comes next, by how often it is solved. A curriculum is a setting; ``Draws`` is what it keeps of one run.
Draws and measurements happen in the order of tickets, so both are a function of the seed and of what was measured."""

import heapq
import math
import random
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.config import Config
from whet.core.types import Group, Task
from whet.data.order import TaskOrder
from whet.metrics import Metrics
from whet.rollouts.pass_rate import pass_rate
from whet.rollouts.sum_tree import SumTree

CURRICULA = {"pass_rate": "whet.rollouts.curriculum:PassRateCurriculum"}


class Draws(Protocol):
    """What a curriculum knows of a run's tasks, by their indices. ``step`` counts published weights."""

    def draw(self, step: int, busy: Container[int]) -> int:
        """The next task; never runs out. ``busy`` are those under way."""
        ...

    def measured(self, task: int, group: Group | None, step: int) -> None:
        """A drawn task came back, before any filter; None: its group was lost to failures."""
        ...

    def dropped(self, task: int) -> None:
        """Its group is not learned from, and another task is drawn in its place."""
        ...

    def metrics(self) -> Metrics: ...

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ``ConfigError`` when the tasks, their order or the seed are others."""
        ...


class InTurn:
    """All tasks in turn, shuffled anew each epoch; see ``Draws``."""

    def __init__(self, count: int, seed: int) -> None:
        self.order = TaskOrder(count, seed)

    def draw(self, step: int, busy: Container[int]) -> int:
        return self.order.next()

    def measured(self, task: int, group: Group | None, step: int) -> None:
        """All the same."""

    def dropped(self, task: int) -> None:
        """All the same."""

    def metrics(self) -> Metrics:
        return Metrics()

    def state(self) -> dict[str, Any]:
        return self.order.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.order.load_state(state)


class Curriculum(Config, ABC):
    """Base of all curricula; subclass it for your own and name it by its dotted path."""

    @abstractmethod
    def over(self, tasks: Sequence[Task], seed: int) -> Draws:
        """A fresh run over the tasks."""


class PassRateCurriculum(Curriculum):
    """Prefer tasks that are sometimes solved: groups that are all right or all wrong teach nothing. A measured task
    with pass rate p is drawn in proportion to p^2t (1 - p)^2(1 - t), with t the ``target``: p (1 - p), the variance of
    the outcome, where t is 0.5. New tasks come easiest first where the task set gives a number ``difficulty`` in the
    tasks' data, otherwise shuffled."""

    target: float = Field(0.5, gt=0, lt=1)
    """The pass rate that is drawn most."""
    threshold: float = 0.5
    """Right is an answer whose score ``correct``, or where there is none whose reward, is above this."""
    explore: float = Field(0.5, gt=0, le=1)
    """Share of draws for tasks that are new, or due to be measured again, while there are any."""
    newest: float = Field(0.5, gt=0, le=1)
    """Weight of a task's newest visit in its running pass rate, or 1 / visits where that is more."""
    retire_after: int = Field(2, gt=0)
    """A task rests after so many visits in a row with every answer right, or with every answer wrong."""
    recheck_after: int = Field(50, gt=0)
    """Steps after which a task that rests is due to be measured again."""

    def over(self, tasks: Sequence[Task], seed: int) -> "PassRateDraws":
        return PassRateDraws(self, tasks, seed)

    def weight(self, rate: float) -> float:
        """Positive also at 0 and 1: one visit is no proof."""
        rate = 0.05 + 0.9 * rate
        return float(rate ** (2 * self.target) * (1 - rate) ** (2 * (1 - self.target)))


@dataclass(slots=True)
class _Seen:
    """A task that was drawn."""

    drawn: int  # step of the last draw
    visits: int = 0
    rate: float = 0.0  # running pass rate
    streak: int = 0  # visits in a row with all answers right, or, negative, all wrong
    rests_until: int | None = None  # step

    @property
    def active(self) -> bool:
        return self.visits > 0 and self.rests_until is None


class PassRateDraws:
    """See ``Draws``. A draw costs the same for few tasks and for many: those that may be drawn are kept in a tree of
    their weights, those that rest in a heap, and all that were drawn in the order of their last draw."""

    def __init__(self, config: PassRateCurriculum, tasks: Sequence[Task], seed: int) -> None:
        self.config, self.seed = config, seed
        self.name = derive_seed("curriculum of", seed, *(task.uid for task in tasks))  # what its indices mean
        self.seen = OrderedDict[int, _Seen]()
        self._draws = 0
        self._weights = SumTree(len(tasks))  # of active tasks, 0 for those that may not be drawn
        self._waiting: dict[int, None] = {}  # active ones that may be drawn from a later step on
        self._resting: list[tuple[int, int]] = []  # a heap of (until which step, task), some of them outdated
        self._new = list(range(len(tasks)))  # in the order in which they come
        random.Random(derive_seed(seed, "curriculum")).shuffle(self._new)
        self._new.sort(key=lambda index: _difficulty(tasks[index]))

    def draw(self, step: int, busy: Container[int]) -> int:
        dice = random.Random(derive_seed(self.seed, "curriculum", self._draws))
        self._draws += 1
        for task in [task for task in self._waiting if self._may_come(task, step, busy)]:
            del self._waiting[task]
            self._weights.put(task, self.config.weight(self.seen[task].rate))
        ahead = self._due(step, busy)
        if len(self.seen) < len(self._new):
            ahead.append(self._new[len(self.seen)])
        if ahead and (not self._weights.total or dice.random() < self.config.explore):
            task = dice.choice(ahead)
        elif self._weights.total:
            task = self._weights.pick(dice.random())
        else:
            oldest = next(iter(self.seen))
            task = next((one for one in self.seen if one not in busy), oldest)
        self.seen.setdefault(task, _Seen(step)).drawn = step
        self.seen.move_to_end(task)
        self._weights.put(task, 0.0)
        self._waiting.pop(task, None)
        return task

    def _may_come(self, task: int, step: int, busy: Container[int]) -> bool:
        return self.seen[task].drawn < step and task not in busy

    def _due(self, step: int, busy: Container[int]) -> list[int]:
        """The task whose rest ended first, if there is one."""
        later, found = list[tuple[int, int]](), list[int]()
        while self._resting and self._resting[0][0] <= step and not found:
            until, task = self._resting[0]
            if self.seen[task].rests_until != until:  # it was measured again
                heapq.heappop(self._resting)
            elif self._may_come(task, step, busy):
                found.append(task)
            else:
                later.append(heapq.heappop(self._resting))
        for one in later:
            heapq.heappush(self._resting, one)
        return found

    def measured(self, task: int, group: Group | None, step: int) -> None:
        seen, config = self.seen[task], self.config
        if group is not None:
            rate = pass_rate(group, config.threshold)
            seen.visits += 1
            seen.rate += (rate - seen.rate) * max(1 / seen.visits, config.newest)
            sign = (rate == 1) - (rate == 0)
            seen.streak = sign * (1 + max(0, sign * seen.streak))
        rests = group is None or abs(seen.streak) >= config.retire_after
        seen.rests_until = step + config.recheck_after if rests else None
        self._file(task)

    def _file(self, task: int) -> None:
        """Note when a task that was measured may come again."""
        seen = self.seen[task]
        self._weights.put(task, 0.0)
        self._waiting.pop(task, None)
        if seen.rests_until is not None:
            heapq.heappush(self._resting, (seen.rests_until, task))
        elif seen.active:
            self._waiting[task] = None

    def dropped(self, task: int) -> None:
        """What was measured counts all the same."""

    def metrics(self) -> Metrics:
        """``curriculum/solved``, ``/unsolved`` (tasks that rest), ``/active`` (others that are measured) and
        ``/pass_rate`` (mean over all that are measured)."""
        known = [seen for seen in self.seen.values() if seen.visits]
        resting = [seen.streak for seen in known if not seen.active]
        least = self.config.retire_after  # what rests for a failure alone is neither
        metrics = Metrics().mean("curriculum/solved", sum(streak >= least for streak in resting))
        metrics.mean("curriculum/unsolved", sum(-streak >= least for streak in resting))
        metrics.mean("curriculum/active", len(known) - len(resting))
        return metrics.mean("curriculum/pass_rate", sum(seen.rate for seen in known), len(known))

    def state(self) -> dict[str, Any]:
        seen = [[task, *astuple(seen)] for task, seen in self.seen.items()]
        return {"count": len(self._new), "name": self.name, "draws": self._draws, "seen": seen}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["count"] != len(self._new):
            raise ConfigError(
                f"the checkpoint was made with {state['count']} tasks, now there are {len(self._new)}: "
                "resume with the same data, or start anew"
            )
        if state.get("name") != self.name:
            raise ConfigError(
                "the checkpoint's curriculum was made with another seed, other tasks, or these in another order: "
                "resume with the same seed and data, or start anew"
            )
        self._draws = state["draws"]
        by_last_draw = sorted(state["seen"], key=lambda saved: saved[1])
        self.seen = OrderedDict((task, _Seen(*values)) for task, *values in by_last_draw)
        self._weights, self._waiting, self._resting = SumTree(len(self._new)), {}, []
        for task in self.seen:
            self._file(task)


def _difficulty(task: Task) -> float:
    """What the task set says of it; unknown: harder than all others. Raises ``DataError`` for a number that is not
    finite, or that no float can hold."""
    value = task.data.get("difficulty")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.inf
    if not abs(value) <= sys.float_info.max:
        shown = value if isinstance(value, float) else "an integer that no float can hold"
        raise DataError(f"task {task.uid!r}: its difficulty must be a finite number, not {shown}")
    return float(value)
