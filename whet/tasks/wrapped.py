"""Base classes of task sets with the tasks of another task set, and other rewards or episodes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from whet.config import Component
from whet.core.types import Task
from whet.tasks.base import TASK_SETS, TaskSet
from whet.tasks.cases import Answer


def inside(scores: Mapping[str, float], taken: Collection[str]) -> dict[str, float]:
    """Return the scores of a task set that is inside another one. A score whose name is ``taken`` there is
    ``inside/NAME``, as where a reward model is around another one."""
    return {f"inside/{name}" if name in taken else name: value for name, value in scores.items()}


class WrappedTaskSet(TaskSet):
    """Tasks of ``taskset``. Subclasses define ``open``."""

    taskset: Annotated[TaskSet, Component(TASK_SETS)]
    """The task set whose tasks are used."""

    @model_validator(mode="after")
    def _can_be_inside(self) -> Self:
        kind = type(self.taskset)
        if self.taskset.has_programs:  # what is around calls make, without the program
            raise ValueError(
                f"{kind.__name__} can't be inside {type(self).__name__}, which plays no programs; for an agent, put it "
                "around: {type: agent, program: ..., taskset: {type: ..., taskset: ...}}"
            )
        if hasattr(kind, "sampler_for"):
            raise ValueError(
                f"a blend can't be inside {type(self).__name__}, where nothing reads its weights, limits and filters; "
                f"put {type(self).__name__} inside, around each of its task sets"
            )
        return self

    def check_one_role(self) -> None:
        """Raise ``ValueError`` if episodes have roles; called where an episode gets one reward."""
        if self.taskset.role_names:
            raise ValueError(
                f"{type(self).__name__} gives an episode one reward, but each role of {type(self.taskset).__name__} "
                f"has its own ({', '.join(self.taskset.role_names)}); choose a task set without roles"
            )

    def tasks(self, split: str) -> Sequence[Task]:
        return self.taskset.tasks(split)

    def gold(self, task: Task) -> Answer | None:
        return self.taskset.gold(task)

    @property
    def grades_groups(self) -> bool:
        return super().grades_groups or self.taskset.grades_groups


class Rewarded(WrappedTaskSet):
    """Base of wrapped task sets that replace the rewards of the task set."""

    rewarded_by: ClassVar[str]  # the source of the new rewards, for an error message

    grade_weight: float = 0.0
    """Weight of the task set's own reward, which is added to the new reward."""

    own_scores: ClassVar[tuple[str, ...]]
    """The names of the scores of the new rewards. With a grader, ``grade`` is its reward."""

    @property
    def score_names(self) -> Collection[str]:
        """Return the names of all scores; empty if the task set does not declare its own."""
        if not self.taskset.grades:
            return self.own_scores
        graders = self.inner_scores(dict.fromkeys(self.taskset.score_names, 0.0))
        return [*graders, *self.own_scores, "grade"] if graders else ()

    def inner_scores(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the scores of the task set, of which those with a name of the new rewards are ``inside/NAME``."""
        return inside(scores, (*self.own_scores, "grade"))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        name = type(self.taskset).__name__
        self.check_one_role()
        if self.taskset.grades_groups:
            raise ValueError(f"{name} sets the rewards of whole groups, which {self.rewarded_by} would replace")
        if self.grade_weight and not self.taskset.grades:
            raise ValueError(f"grade_weight = {self.grade_weight:g}, but {name} grades nothing; set it to 0")
        return self
