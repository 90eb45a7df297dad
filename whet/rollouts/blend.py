"""Several task sets in one run, each with a share of the tasks and optionally with its own limits, filters, rewards and
curriculum. A task's uid begins with the name of its environment."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from whet.base.closing import Closing
from whet.base.errors import ConfigError, DataError, naming
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.config import Component, Config
from whet.core.types import Group, Task
from whet.metrics import Metrics
from whet.rollouts.curriculum import CURRICULA, Curriculum, ShuffledSampler, TaskSampler
from whet.rollouts.filters import FILTERS, Filter
from whet.rollouts.group_metrics import ByEnvironment
from whet.rollouts.rewards import REWARDS, Reward
from whet.rollouts.sampling import Limits
from whet.tasks.base import TASK_SETS, AskPolicy, Environment, Environments, Program, TaskSet, called
from whet.tasks.cases import Answer, Case
from whet.tasks.listing import tasks_of

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class Part(Config):
    """One environment of a blend."""

    taskset: Annotated[TaskSet, Component(TASK_SETS)]
    """The tasks of this environment."""
    weight: float = Field(1.0, gt=0)
    """The share of the groups is this weight divided by the sum of all weights."""
    sampling: Limits = Limits()
    """Limits for its episodes, none of them higher than in ``sampling`` of the recipe."""
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] | None = None
    """Filters of its groups; None: the algorithm's."""
    rewards: Annotated[Reward, Component(REWARDS)] | None = None
    """The reward of its episodes; None: ``rewards`` of the recipe."""
    curriculum: Annotated[Curriculum, Component(CURRICULA)] | None = None
    """The curriculum of its tasks; None: all tasks in turn, shuffled in each epoch."""


class Blend(TaskSet):
    """Several environments in one run."""

    of: dict[Name, Part] = Field(min_length=1)
    """The environments by their names in the metrics."""
    shares: Literal["kept", "drawn"] = "kept"
    """``kept``: shares of the groups that are trained on, so a group that a filter drops is replaced by another of its
    environment. ``drawn``: shares of the groups that are drawn."""

    @field_validator("of")
    @classmethod
    def _flat(cls, of: dict[str, Part]) -> dict[str, Part]:
        for name, part in of.items():
            if isinstance(part.taskset, Blend):
                raise ValueError(f"{name} is itself a blend; list its environments here")
        return of

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = list[Task]()
        for name, part in self.of.items():
            with naming(f"the environment {name}"):
                tasks += [_with_prefix(name, task) for task in tasks_of(part.taskset, split)]
        return tasks

    def cases(self) -> Sequence[Case]:
        return [
            replace(case, name=f"{name}: {case.name}", task=_with_prefix(name, case.task))
            for name, part in self.of.items()
            for case in part.taskset.cases()
        ]

    def gold(self, task: Task) -> Answer | None:
        return self.of[task.environment].taskset.gold(_without_prefix(task))

    def stated(self, task: Task, answer: str) -> str | None:
        return self.of[task.environment].taskset.stated(_without_prefix(task), answer)

    def open(self) -> "BlendedEnvironments":
        return BlendedEnvironments(self)

    @property
    def grades(self) -> bool:
        return all(part.taskset.grades for part in self.of.values())

    @property
    def states_answers(self) -> bool:
        return all(part.taskset.states_answers for part in self.of.values())

    def sampler_for(self, tasks: Sequence[Task], seed: int) -> "BlendSampler":
        """Return the sampler of a run over the tasks of a split."""
        return BlendSampler(self, tasks, seed)


class BlendedEnvironments(Environments):
    """The environments of all parts."""

    def __init__(self, blend: Blend) -> None:
        self.parts = {name: part.taskset.open() for name, part in blend.of.items()}

    def make(self, task: Task) -> Environment:
        return self.parts[task.environment].make(_without_prefix(task))

    def program_for(self, task: Task) -> Program | None:
        return self.parts[task.environment].program_for(_without_prefix(task))

    def use_policy(self, ask: AskPolicy) -> None:
        for environments in self.parts.values():
            environments.use_policy(ask)

    @property
    def restarts(self) -> int:
        return sum(environments.restarts for environments in self.parts.values())

    async def score_group(self, task: Task, group: Group) -> None:
        await called(self.parts[task.environment].score_group, _without_prefix(task), group)

    async def close(self) -> None:
        async with Closing() as closing:
            for name, environments in self.parts.items():
                closing.closes(f"the environment {name}", environments.close)


class BlendSampler:
    """See ``TaskSampler``. The next environment is the one that is furthest behind its share (smooth weighted
    round-robin), so that in any sequence of draws each has its share, up to one; its own curriculum selects the
    task."""

    def __init__(self, blend: Blend, tasks: Sequence[Task], seed: int) -> None:
        self.blend, self.by_environment = blend, ByEnvironment(blend.of)
        self._samplers: dict[str, TaskSampler] = {}
        self._first: dict[str, int] = {}  # index of an environment's first task
        for name, part in blend.of.items():
            indices = [index for index, task in enumerate(tasks) if task.environment == name]
            if not indices:
                raise DataError(f"data.of.{name} has no training tasks")
            start = self._first[name] = indices[0]
            environment_tasks = tasks[start : start + len(indices)]
            part_seed = derive_seed(seed, "blend", name)
            self._samplers[name] = (
                part.curriculum.sampler_for(environment_tasks, part_seed)
                if part.curriculum
                else ShuffledSampler(len(indices), part_seed)
            )
        self._tasks = tasks
        self._behind = dict.fromkeys(blend.of, 0.0)  # lag behind the share, in groups times the sum of weights
        self._to_replace: list[str] = []  # environments whose groups were dropped

    def draw(self, step: int, busy: Container[int]) -> int:
        name = self._to_replace.pop(0) if self._to_replace else self._next()
        first = self._first[name]
        return first + self._samplers[name].draw(step, _Shifted(busy, first))

    def _next(self) -> str:
        for name, part in self.blend.of.items():
            self._behind[name] += part.weight
        name = max(self._behind, key=self._behind.__getitem__)
        self._behind[name] -= sum(part.weight for part in self.blend.of.values())
        return name

    def measured(self, task: int, group: Group | None, step: int) -> None:
        name = self._tasks[task].environment
        self._samplers[name].measured(task - self._first[name], group, step)
        self.by_environment.count(name, group)

    def dropped(self, task: int) -> None:
        if self.blend.shares == "kept":
            self._to_replace.append(self._tasks[task].environment)

    def metrics(self) -> Metrics:
        metrics = self.by_environment.metrics()
        for name, sampler in self._samplers.items():
            metrics.merge(sampler.metrics(), prefix=f"env/{name}/")
        return metrics

    def state(self) -> JsonObject:
        draws = {name: sampler.state() for name, sampler in self._samplers.items()}
        return {
            "draws": draws,
            "behind": self._behind,
            "owed": self._to_replace,
            "history": self.by_environment.history,
        }

    def load_state(self, state: JsonObject) -> None:
        if (saved := sorted(state.get("draws", ()))) != sorted(self._samplers):
            raise ConfigError(
                f"the checkpoint was made with {'the environments ' + ', '.join(saved) if saved else 'no blend'}, "
                f"but the recipe has {', '.join(sorted(self._samplers))}; resume with the same data, or start a new run"
            )
        for name, sampler in self._samplers.items():
            sampler.load_state(state["draws"][name])
        self._behind, self._to_replace = dict(state["behind"]), list(state["owed"])
        self.by_environment.history = {name: list(rewards) for name, rewards in state["history"].items()}


class _Shifted(Container[int]):
    """Indices of all tasks, seen as indices of one environment's tasks."""

    def __init__(self, whole: Container[int], first: int) -> None:
        self._whole, self._first = whole, first

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index + self._first in self._whole


def _with_prefix(name: str, task: Task) -> Task:
    return replace(task, uid=f"{name}/{task.uid}", environment=name)


def _without_prefix(task: Task) -> Task:
    """Return the task as in its own task set, without the environment's name."""
    return replace(task, uid=task.uid.removeprefix(f"{task.environment}/"), environment="")
