"""Curricula: the order of tasks, depending on how often each is solved. A curriculum is a setting; a ``TaskSampler`` is
its state in one run. Draws and measurements happen in the order of tickets, so both are a function of the seed
and of the measurements."""

import heapq
import math
import random
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.core.types import Group, Task
from whet.data.order import TaskOrder
from whet.metrics import Metrics
from whet.rollouts.group_metrics import pass_rate
from whet.rollouts.sum_tree import SumTree

CURRICULA = {"pass_rate": "whet.rollouts.curriculum:PassRateCurriculum"}


class TaskSampler(Protocol):
    """Selects the tasks of a run, by their indices. ``step`` counts published weights."""

    def draw(self, step: int, busy: Container[int]) -> int:
        """Return the next task; never runs out. ``busy`` are the tasks in flight."""
        ...

    def measured(self, task: int, group: Group | None, step: int) -> None:
        """Record a drawn task's group, before any filter; None: the group was lost to failures."""
        ...

    def dropped(self, task: int) -> None:
        """Record that the task's group is not trained on, and that another task is drawn in its place."""
        ...

    def metrics(self) -> Metrics: ...

    def state(self) -> JsonObject:
        """Return JSON values for a checkpoint."""
        ...

    def load_state(self, state: dict[str, object]) -> None:
        """Continue from a saved state. Raises ``ConfigError`` if the tasks, their order or the seed differ."""
        ...


class ShuffledSampler:
    """All tasks in turn, shuffled in each epoch; see ``TaskSampler``."""

    def __init__(self, count: int, seed: int) -> None:
        self.order = TaskOrder(count, seed)

    def draw(self, step: int, busy: Container[int]) -> int:
        return self.order.next()

    def measured(self, task: int, group: Group | None, step: int) -> None:
        """Results don't change the order."""

    def dropped(self, task: int) -> None:
        """Results don't change the order."""

    def metrics(self) -> Metrics:
        return Metrics()

    def state(self) -> JsonObject:
        return self.order.state()

    def load_state(self, state: dict[str, object]) -> None:
        self.order.load_state(state)


class Curriculum(Config, ABC):
    """Base of all curricula. Subclass it for your own and name the subclass by its dotted path."""

    @abstractmethod
    def sampler_for(self, tasks: Sequence[Task], seed: int) -> TaskSampler:
        """Return the sampler of a new run over the tasks."""


class PassRateCurriculum(Curriculum):
    """Prefer tasks that are sometimes solved, because groups that are all right or all wrong have no advantage. A
    measured task with pass rate p is drawn in proportion to p^2t (1 - p)^2(1 - t), with t the ``target``; for t = 0.5
    this is p (1 - p), the variance of the outcome. New tasks are drawn easiest first if the task set gives a number
    ``difficulty`` in the tasks' data, otherwise shuffled."""

    target: float = Field(0.5, gt=0, lt=1)
    """The pass rate that is drawn most often."""
    threshold: float = 0.5
    """An answer is right if its score ``correct``, or its reward if it has no such score, is above this."""
    explore: float = Field(0.5, gt=0, le=1)
    """Share of draws for tasks that are new or due to be measured again, while there are any."""
    newest: float = Field(0.5, gt=0, le=1)
    """Weight of a task's newest visit in its running pass rate, or 1 / visits if that is larger."""
    retire_after: int = Field(2, gt=0)
    """A task rests after this many consecutive visits with every answer right, or with every answer wrong."""
    recheck_after: int = Field(50, gt=0)
    """Steps after which a resting task is due to be measured again."""

    def sampler_for(self, tasks: Sequence[Task], seed: int) -> "PassRateSampler":
        return PassRateSampler(self, tasks, seed)

    def weight(self, rate: float) -> float:
        """Return the weight of a pass rate. Positive also at 0 and 1, because a single visit is not conclusive."""
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


class PassRateSampler:
    """See ``TaskSampler``. The cost of a draw is nearly independent of the number of tasks: active tasks are in a tree
    of their weights, resting tasks in a heap, and all drawn tasks in the order of their last draw."""

    def __init__(self, config: PassRateCurriculum, tasks: Sequence[Task], seed: int) -> None:
        self.config, self.seed = config, seed
        # identifies the tasks that the indices refer to
        self.name = derive_seed("curriculum of", seed, *(task.uid for task in tasks))
        self.seen = OrderedDict[int, _Seen]()
        self._draws = 0
        self._weights = SumTree(len(tasks))  # of active tasks, 0 if a task may not be drawn
        self._waiting: dict[int, None] = {}  # active tasks that may be drawn from a later step on
        self._resting: list[tuple[int, int]] = []  # a heap of (last step of the rest, task), some of them outdated
        self._new = list(range(len(tasks)))  # in the order in which they are drawn
        random.Random(derive_seed(seed, "curriculum")).shuffle(self._new)
        self._new.sort(key=lambda index: _difficulty(tasks[index]))

    def draw(self, step: int, busy: Container[int]) -> int:
        dice = random.Random(derive_seed(self.seed, "curriculum", self._draws))
        self._draws += 1
        for task in [task for task in self._waiting if self._may_be_drawn(task, step, busy)]:
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
            task = next((candidate for candidate in self.seen if candidate not in busy), oldest)
        self.seen.setdefault(task, _Seen(step)).drawn = step
        self.seen.move_to_end(task)
        self._weights.put(task, 0.0)
        self._waiting.pop(task, None)
        return task

    def _may_be_drawn(self, task: int, step: int, busy: Container[int]) -> bool:
        return self.seen[task].drawn < step and task not in busy

    def _due(self, step: int, busy: Container[int]) -> list[int]:
        """Return the task whose rest ended first, as a list of one or none."""
        later, due = list[tuple[int, int]](), list[int]()
        while self._resting and self._resting[0][0] <= step and not due:
            until, task = self._resting[0]
            if self.seen[task].rests_until != until:  # it was measured again
                heapq.heappop(self._resting)
            elif self._may_be_drawn(task, step, busy):
                due.append(task)
            else:
                later.append(heapq.heappop(self._resting))
        for entry in later:
            heapq.heappush(self._resting, entry)
        return due

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
        self._schedule(task)

    def _schedule(self, task: int) -> None:
        """Store when a measured task may be drawn again."""
        seen = self.seen[task]
        self._weights.put(task, 0.0)
        self._waiting.pop(task, None)
        if seen.rests_until is not None:
            heapq.heappush(self._resting, (seen.rests_until, task))
        elif seen.active:
            self._waiting[task] = None

    def dropped(self, task: int) -> None:
        """The measurement counts anyway."""

    def metrics(self) -> Metrics:
        """Return ``curriculum/solved`` and ``/unsolved`` (resting tasks), ``/active`` (other measured tasks) and
        ``/pass_rate`` (mean over all measured tasks)."""
        measured = [seen for seen in self.seen.values() if seen.visits]
        resting = [seen.streak for seen in measured if not seen.active]
        least = self.config.retire_after  # a task that rests only because of a failure is neither
        metrics = Metrics().mean("curriculum/solved", sum(streak >= least for streak in resting))
        metrics.mean("curriculum/unsolved", sum(-streak >= least for streak in resting))
        metrics.mean("curriculum/active", len(measured) - len(resting))
        return metrics.mean("curriculum/pass_rate", sum(seen.rate for seen in measured), len(measured))

    def state(self) -> JsonObject:
        seen = [[task, *astuple(seen)] for task, seen in self.seen.items()]
        return {"count": len(self._new), "name": self.name, "draws": self._draws, "seen": seen}

    def load_state(self, state: JsonObject) -> None:
        if state["count"] != len(self._new):
            raise ConfigError(
                f"the checkpoint was made with {state['count']} tasks, but there are {len(self._new)} "
                "now; resume with the same data, or start a new run"
            )
        if state.get("name") != self.name:
            raise ConfigError(
                "the checkpoint's curriculum was made with another seed, other tasks, or another order of tasks; "
                "resume with the same seed and data, or start a new run"
            )
        self._draws = state["draws"]
        by_last_draw = sorted(state["seen"], key=lambda saved: saved[1])
        self.seen = OrderedDict((task, _Seen(*values)) for task, *values in by_last_draw)
        self._weights, self._waiting, self._resting = SumTree(len(self._new)), {}, []
        for task in self.seen:
            self._schedule(task)


def _difficulty(task: Task) -> float:
    """Return the difficulty that the task set gives; infinity if there is none. Raises ``DataError`` for a number that
    is not finite, or too large for a float."""
    value = task.columns.get("difficulty")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.inf
    if not abs(value) <= sys.float_info.max:
        shown = value if isinstance(value, float) else "an integer too large for a float"
        raise DataError(f"task {task.uid!r}: its difficulty must be a finite number, not {shown}")
    return float(value)
