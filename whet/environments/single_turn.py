"""The commonest episode: one prompt, one reply, one grade. Knows the task set only by its ``grade``."""

from collections.abc import Mapping

from whet.environments.base import Observation, Step, TaskSet, finite
from whet.errors import DataError
from whet.types import Message, Task


class SingleTurn:
    """An episode of one turn, graded by ``taskset.grade``."""

    def __init__(self, taskset: TaskSet, task: Task):
        self.taskset = taskset
        self.task = task

    async def start(self) -> Observation:
        return Observation(messages=list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        """Raises ``DataError`` when the grade is no finite number: a broken grader is never a reward of zero."""
        scores = checked_scores(await self.taskset.grade(self.task, reply["content"]), self.task, self.taskset)
        return Step(reward=scores.pop("reward"), scores=scores, done=True)

    async def close(self) -> None:
        """Nothing is held."""


def checked_scores(scores: Mapping[str, float], task: Task, taskset: TaskSet) -> dict[str, float]:
    """The scores as floats, with ``reward`` among them. Raises ``DataError`` naming the task otherwise."""
    where = f"{type(taskset).__name__}.grade of task {task.uid!r}"
    if not isinstance(scores, Mapping) or "reward" not in scores:
        raise DataError(f"{where} must return a dict with the key 'reward', not {scores!r}")
    return {name: finite(value, f"{name}, returned by {where},") for name, value in scores.items()}
