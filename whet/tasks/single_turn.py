"""The commonest episode: one prompt, one reply, one grade."""

from collections.abc import Mapping

from whet.base.errors import DataError
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.tasks.base import Environment, Environments, Grade, Observation, Step, called, checked_score, place_of


class SingleTurn(Environment):
    """An episode of one turn, graded by ``environments.grade``."""

    def __init__(self, environments: Environments, task: Task) -> None:
        self.environments, self.task = environments, task

    async def start(self) -> Observation:
        return Observation(messages=list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        """Raises ``DataError`` when the grade is not a finite number: a broken grader is never a reward of zero."""
        scores = await graded(self.environments, self.task, text_of(reply["content"]))
        return Step(reward=scores.pop("reward"), scores=scores, done=True)


async def graded(environments: Environments, task: Task, answer: str) -> dict[str, float]:
    """Return what ``environments.grade`` gives to one answer, with ``reward`` among the scores."""
    return checked_scores(await called(environments.grade, task, answer), task, environments)


def checked_scores(scores: Grade, task: Task, environments: Environments) -> dict[str, float]:
    """Return the scores as floats, with ``reward`` among them. Raises ``DataError`` naming the task otherwise."""
    where = f"{place_of(type(environments), 'grade')} of task {task.uid!r}"
    if not isinstance(scores, Mapping):
        reward = checked_score("reward", scores, f"returned by {where}")
        return {"reward": reward, "correct": reward} if isinstance(scores, bool) else {"reward": reward}
    if "reward" not in scores:
        raise DataError(f"{where} must return the reward, or a dict with the key 'reward', not {scores!r}")
    return {name: checked_score(name, value, f"returned by {where}") for name, value in scores.items()}
