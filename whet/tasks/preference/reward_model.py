"""The tasks of another task set, rewarded by a reward model: reinforcement learning from (human) feedback.

What is paid is ``(score - shift) x scale``, held within ``clamp``, plus ``grade_weight`` times the reward of the task
set's own grader. The scores keep all parts apart, and ``correct`` stays that of the grader: whoever learns to please
the model without getting better is found out.
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from whet.core.types import Message, Task
from whet.tasks.base import Environment, Environments, Observation, Step, called, finite
from whet.tasks.preference.reward_model_process import CutScore, RewardModelClient, RewardModelProcess
from whet.tasks.wrapped import Rewarded


class RewardModelTasks(Rewarded):
    """Tasks of ``taskset``, rewards of ``model``."""

    rewarded_by: ClassVar[str] = "a reward model"

    model: str
    """A folder that ``whet export`` wrote, or a decoder with a linear head to one label on the Hugging Face Hub."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    scale: float = 1.0
    shift: float = 0.0
    """A score that is worth nothing."""
    clamp: float | None = Field(None, gt=0)
    """Scaled scores beyond plus or minus this are cut off: far out, a reward model knows nothing."""
    process: RewardModelProcess = RewardModelProcess()
    """The settings of its process."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        """A run may be resumed from another working folder."""
        folder = Path(model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else model

    def open(self) -> "RewardedEnvironments":
        return RewardedEnvironments(self)

    def paid(self, score: float) -> float:
        """Return the reward of a score of the model."""
        value = (finite(score, f"the score of the reward model {self.model}") - self.shift) * self.scale
        return value if self.clamp is None else max(-self.clamp, min(self.clamp, value))


class RewardedEnvironments(Environments):
    """The environments of the task set, with the reward model at work."""

    def __init__(self, tasks: RewardModelTasks) -> None:
        self.tasks, self.inner = tasks, tasks.taskset.open()
        self.model = RewardModelClient(tasks.model, tasks.revision, tasks.process)

    def make(self, task: Task) -> Environment:
        environments = self.inner if self.tasks.taskset.grades else _Ungraded()
        return RewardedEpisode(self, environments.make(task))

    async def close(self) -> None:
        self.model.close()
        await called(self.inner.close)


class RewardedEpisode(Environment):
    """An episode of the task set. The conversation is scored after every reply and the difference is paid, so that the
    rewards add up to what the conversation is worth, wherever it ends."""

    def __init__(self, environments: RewardedEnvironments, inner: Environment) -> None:
        self.model, self.tasks, self.inner = environments.model, environments.tasks, inner
        self.seen = Observation([])
        self.paid = self.graded = 0.0

    async def start(self) -> Observation:
        observation = await self.inner.start()
        self.seen = Observation(list(observation.messages), observation.tools)
        return observation

    async def step(self, reply: Message) -> Step:
        step = await self.inner.step(reply)
        self.seen.messages.append(reply)
        score = await self.model.score(self.seen.messages, self.seen.tools)
        self.seen.messages += step.messages
        value = self.tasks.paid(score)
        reward = value - self.paid + self.tasks.grade_weight * step.reward
        self.paid = value
        self.graded += step.reward
        scores = {"reward_model": float(score), **step.scores}
        if isinstance(score, CutScore):
            scores["reward_model_cut"] = 1.0
        if self.tasks.taskset.grades:
            scores = {"correct": float(self.graded > 0), **scores, "grade": self.graded}
        return Step(reward, step.done, step.messages, scores)

    async def close(self) -> None:
        await self.inner.close()


class _Ungraded(Environments):
    """Nobody but the reward model says what an answer is worth."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": 0.0}
