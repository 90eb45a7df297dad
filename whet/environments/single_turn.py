"""The commonest episode: one prompt, one reply, one grade."""

from collections.abc import Mapping

from whet.environments.base import Environments, Observation, Step, checked_score
from whet.errors import DataError
from whet.types import Message, Task


class SingleTurn:
    """An episode of one turn, graded by ``environments.grade``."""

    def __init__(self, environments: Environments, task: Task) -> None:
        self.environments, self.task = environments, task

    async def start(self) -> Observation:
        return Observation(messages=list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        """Raises ``DataError`` when the grade is no finite number: a broken grader is never a reward of zero."""
        scores = checked_scores(
            await self.environments.grade(self.task, reply["content"]), self.task, self.environments
        )
        return Step(reward=scores.pop("reward"), scores=scores, done=True)

    async def close(self) -> None:
        """Nothing is held."""


def checked_scores(scores: Mapping[str, float], task: Task, environments: Environments) -> dict[str, float]:
    """Return the scores as floats, with ``reward`` among them. Raises ``DataError`` naming the task otherwise."""
    where = f"{type(environments).__name__}.grade of task {task.uid!r}"
    if not isinstance(scores, Mapping) or "reward" not in scores:
        raise DataError(f"{where} must return a dict with the key 'reward', not {scores!r}")
    return {name: checked_score(name, value, f"returned by {where}") for name, value in scores.items()}
