"""The episode of one turn, and episodes played with given replies instead of a model."""

from collections.abc import Mapping, Sequence

from whet.base.errors import DataError
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.tasks.base import Environment, Environments, Grade, Observation, Step, called, checked_score, is_bool
from whet.tasks.cases import Answer
from whet.tasks.scores import check_named, weighted_reward


class SingleTurn(Environment):
    """An episode of one turn, graded by ``environments.grade``."""

    def __init__(self, environments: Environments, task: Task) -> None:
        self.environments, self.task = environments, task

    async def start(self) -> Observation:
        return Observation(messages=list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        """Return the grade of the reply. Raises ``DataError`` for a grade that is not a finite number: a broken grader
        is never a reward of zero."""
        scores = await graded(self.environments, self.task, text_of(reply["content"]))
        return Step(reward=scores.pop("reward"), scores=scores, done=True)


async def graded(environments: Environments, task: Task, answer: str) -> dict[str, float]:
    """Return the scores of one answer by ``environments.grade``, including ``reward``."""
    return checked_scores(await called(environments.grade, task, answer), task, environments)


def checked_scores(scores: Grade, task: Task, environments: Environments) -> dict[str, float]:
    """Return the scores as floats, including ``reward``. Raises ``DataError`` naming the task for invalid scores."""
    where = f"{environments.graded_by} of task {task.uid!r}"
    if not isinstance(scores, Mapping):
        reward = checked_score("reward", scores, f"returned by {where}")
        return {"reward": reward, "correct": reward} if is_bool(scores) else {"reward": reward}
    declared = environments.named_scores
    checked = {name: checked_score(name, value, f"returned by {where}") for name, value in scores.items()}
    if declared:
        check_named(checked, declared, where)
    if "reward" not in checked:
        if (weighted := weighted_reward(checked, declared)) is None:
            raise DataError(f"{where} must return the reward, or a dict with the key 'reward', not {scores!r}")
        checked = {"reward": weighted, **checked}
    return checked


async def play(environment: Environment, answer: Answer) -> tuple[Observation, Step]:
    """Give an environment the replies of ``answer`` until the episode is done, and close it.

    Returns the first messages for the model, and the whole episode as one step: rewards are summed, later scores
    replace earlier ones, and ``messages`` is the conversation after the first messages.
    """
    replies: Sequence[Message] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    episode = Step(done=False)
    try:
        observation = await environment.start()
        for reply in replies:
            step = await environment.step(reply)
            episode.reward += step.reward
            episode.scores |= step.scores
            episode.messages += [reply, *step.messages]
            episode.done = step.done
            if step.done:
                break
    finally:
        await environment.close()
    return observation, episode
