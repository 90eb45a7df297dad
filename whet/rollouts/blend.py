"""Several task sets in one run, each with a share of the tasks, with limits, filters, rewards and a curriculum of its
own. A task's uid begins with the name of its environment."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from whet.base.closing import Closing
from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.config import Component, Config
from whet.core.types import Group, Task
from whet.metrics import Metrics
from whet.rollouts.by_environment import ByEnvironment
from whet.rollouts.curriculum import CURRICULA, Curriculum, Draws, InTurn
from whet.rollouts.filters import FILTERS, Filter
from whet.rollouts.rewards import REWARDS, Reward
from whet.rollouts.sampling import Limits
from whet.tasks.base import Environment, Environments, Program, TaskSet, called
from whet.tasks.cases import Answer, Case
from whet.tasks.registry import TASK_SETS

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class Part(Config):
    """One environment of a blend."""

    taskset: Annotated[TaskSet, Component(TASK_SETS)]
    """Its tasks."""
    weight: float = Field(1.0, gt=0)
    """Its share of the groups is this, divided by the sum of all weights."""
    sampling: Limits = Limits()
    """Lower limits than those of ``sampling``, for its episodes."""
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] | None = None
    """Filters of its groups; None: the algorithm's."""
    rewards: Annotated[Reward, Component(REWARDS)] | None = None
    """What its episodes earn; None: what ``rewards`` of the recipe says."""
    curriculum: Annotated[Curriculum, Component(CURRICULA)] | None = None
    """Which of its tasks comes next; None: all of them in turn."""


class Blend(TaskSet):
    """Several environments in one run."""

    of: dict[Name, Part] = Field(min_length=1)
    """The environments, each with its name in the metrics."""
    shares: Literal["kept", "drawn"] = "kept"
    """Of what the shares are: of the groups that are learned from (one that a filter drops is replaced by another of
    its environment), or of those that are drawn."""

    @field_validator("of")
    @classmethod
    def _flat(cls, of: dict[str, Part]) -> dict[str, Part]:
        for name, part in of.items():
            if isinstance(part.taskset, Blend):
                raise ValueError(f"{name} is a blend itself; list its environments here")
        return of

    def tasks(self, split: str) -> Sequence[Task]:
        return [_named(name, task) for name, part in self.of.items() for task in part.taskset.tasks(split)]

    def cases(self) -> Sequence[Case]:
        return [
            replace(case, name=f"{name}: {case.name}", task=_named(name, case.task))
            for name, part in self.of.items()
            for case in part.taskset.cases()
        ]

    def gold(self, task: Task) -> Answer | None:
        return self.of[task.environment].taskset.gold(_own(task))

    def open(self) -> "BlendedEnvironments":
        return BlendedEnvironments(self)

    @property
    def grades(self) -> bool:
        return all(part.taskset.grades for part in self.of.values())

    def over(self, tasks: Sequence[Task], seed: int) -> "BlendDraws":
        """Begin a run over the tasks of a split."""
        return BlendDraws(self, tasks, seed)


class BlendedEnvironments(Environments):
    """The environments of all parts."""

    def __init__(self, blend: Blend) -> None:
        self.parts = {name: part.taskset.open() for name, part in blend.of.items()}

    def make(self, task: Task) -> Environment:
        return self.parts[task.environment].make(_own(task))

    def program_for(self, task: Task) -> Program | None:
        return self.parts[task.environment].program_for(_own(task))

    async def score_group(self, task: Task, group: Group) -> None:
        await called(self.parts[task.environment].score_group, _own(task), group)

    async def close(self) -> None:
        async with Closing() as closing:
            for name, environments in self.parts.items():
                closing.closes(f"the environment {name}", environments.close)


class BlendDraws:
    """See ``Draws``. Next is the environment that is furthest behind its share (smooth weighted round-robin), so that
    in any run of draws each has its share, up to one; which of its tasks, its own curriculum says."""

    def __init__(self, blend: Blend, tasks: Sequence[Task], seed: int) -> None:
        self.blend, self.apart = blend, ByEnvironment(blend.of)
        self._draws: dict[str, Draws] = {}
        self._first: dict[str, int] = {}  # index of its first task
        for name, part in blend.of.items():
            own = [index for index, task in enumerate(tasks) if task.environment == name]
            if not own:
                raise DataError(f"data.of.{name} has no training tasks")
            start = self._first[name] = own[0]
            over = tasks[start : start + len(own)]
            seed_of = derive_seed(seed, "blend", name)
            self._draws[name] = part.curriculum.over(over, seed_of) if part.curriculum else InTurn(len(own), seed_of)
        self._tasks = tasks
        self._behind = dict.fromkeys(blend.of, 0.0)  # groups, times the sum of weights
        self._owed: list[str] = []  # environments whose groups were dropped

    def draw(self, step: int, busy: Container[int]) -> int:
        name = self._owed.pop(0) if self._owed else self._next()
        first = self._first[name]
        return first + self._draws[name].draw(step, _Shifted(busy, first))

    def _next(self) -> str:
        for name, part in self.blend.of.items():
            self._behind[name] += part.weight
        name = max(self._behind, key=self._behind.__getitem__)
        self._behind[name] -= sum(part.weight for part in self.blend.of.values())
        return name

    def measured(self, task: int, group: Group | None, step: int) -> None:
        name = self._tasks[task].environment
        self._draws[name].measured(task - self._first[name], group, step)
        self.apart.count(name, group)

    def dropped(self, task: int) -> None:
        if self.blend.shares == "kept":
            self._owed.append(self._tasks[task].environment)

    def metrics(self) -> Metrics:
        metrics = self.apart.metrics()
        for name, draws in self._draws.items():
            metrics.merge(draws.metrics(), prefix=f"env/{name}/")
        return metrics

    def state(self) -> dict[str, Any]:
        draws = {name: draws.state() for name, draws in self._draws.items()}
        return {"draws": draws, "behind": self._behind, "owed": self._owed, "history": self.apart.history}

    def load_state(self, state: dict[str, Any]) -> None:
        if (saved := sorted(state.get("draws", ()))) != sorted(self._draws):
            raise ConfigError(
                f"the checkpoint was made with the environments {', '.join(saved) or 'of no blend'}, now there are "
                f"{', '.join(sorted(self._draws))}: resume with the same data, or start anew"
            )
        for name, draws in self._draws.items():
            draws.load_state(state["draws"][name])
        self._behind, self._owed = dict(state["behind"]), list(state["owed"])
        self.apart.history = {name: list(rewards) for name, rewards in state["history"].items()}


class _Shifted(Container[int]):
    """Indices of all tasks, as those of one environment."""

    def __init__(self, whole: Container[int], first: int) -> None:
        self._whole, self._first = whole, first

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index + self._first in self._whole


def _named(name: str, task: Task) -> Task:
    return replace(task, uid=f"{name}/{task.uid}", environment=name)


def _own(task: Task) -> Task:
    """The task as its own task set knows it."""
    return replace(task, uid=task.uid.removeprefix(f"{task.environment}/"), environment="")
