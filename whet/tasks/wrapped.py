"""Task sets that pose the tasks of another one, and reward or play them in a way of their own."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from whet.config import Component
from whet.core.types import Task
from whet.tasks.base import Environments, TaskSet
from whet.tasks.cases import Answer
from whet.tasks.registry import TASK_SETS


class WrappedTaskSet(TaskSet):
    """Tasks of ``taskset``. Subclasses define ``open``."""

    taskset: Annotated[TaskSet, Component(TASK_SETS)]
    """The task set that poses tasks."""

    def tasks(self, split: str) -> Sequence[Task]:
        return self.taskset.tasks(split)

    def gold(self, task: Task) -> Answer | None:
        return self.taskset.gold(task)


class Rewarded(WrappedTaskSet):
    """Base of those whose rewards stand in for the task set's own."""

    rewarded_by: ClassVar[str]  # who would overrule it

    grade_weight: float = 0.0
    """Adds this times the task set's own reward."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        name = type(self.taskset).__name__
        if type(self.taskset).score_group is not Environments.score_group:
            raise ValueError(f"{name} changes rewards in view of the group, which {self.rewarded_by} would overrule")
        if self.grade_weight and not self.taskset.grades:
            raise ValueError(f"grade_weight = {self.grade_weight:g}, but {name} grades nothing")
        return self
