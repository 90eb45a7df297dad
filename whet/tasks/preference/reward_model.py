"""The tasks of another task set, rewarded by a reward model: reinforcement learning from (human) feedback.

The reward is ``(score - shift) x scale``, clamped to ``clamp``, plus ``grade_weight`` times the reward of the task
set's own grader. Each part is logged as a score, and ``correct`` is the grader's: a policy that only learns to please
the reward model shows there.
"""

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from whet.base.errors import ConfigError, WhetError
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.fetch.model import absolute_path, check_model, generates_text
from whet.tasks.base import AskPolicy, Environment, Environments, Observation, Step, called, finite
from whet.tasks.preference.reward_model_process import CutScore, RewardModelClient, RewardModelProcess
from whet.tasks.wrapped import Rewarded


class RewardModelTasks(Rewarded):
    """Tasks of ``taskset``, rewards of ``model``."""

    rewarded_by: ClassVar[str] = "a reward model"
    own_scores: ClassVar[tuple[str, ...]] = ("reward_model", "reward_model_cut")

    model: str
    """A folder or an artifact that ``whet export`` wrote, or a decoder with a linear head to one label on the Hugging
    Face Hub."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    label: str | int | None = None
    """The label, by name or number, of a classifier of texts, for example of sentiment, which scores the last reply
    alone. None: ``model`` is a reward model."""
    value: Literal["probability", "logit"] = "probability"
    """With ``label`` its score."""
    scale: float = 1.0
    shift: float = 0.0
    """The score that earns a reward of 0."""
    clamp: float | None = Field(None, gt=0)
    """Scaled scores are limited to plus or minus this, because a reward model's extreme scores mean little."""
    process: RewardModelProcess = RewardModelProcess()
    """The settings of its process."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return absolute_path(model)

    def check_available(self) -> None:
        check_model(self.model)
        if generates_text(self.model):
            kind = "reward model" if self.label is None else "classifier"
            raise WhetError(f"{self.model} is a language model and not a {kind}, so it has no head that scores")

    @model_validator(mode="after")
    def _classifies(self) -> "RewardModelTasks":
        if self.label is None and self.value != "probability":
            raise ValueError(f"value = {self.value} is read only with a label; leave it out")
        if self.label is not None and self.value == "logit" and self.clamp is None:
            raise ValueError("value = logit has no lower limit; set clamp, whose negative rewards empty answers")
        return self

    @property
    def score_names(self) -> Collection[str]:
        names = super().score_names
        return [*names, "correct"] if self.taskset.grades and names and "correct" not in names else names

    def open(self) -> "RewardedEnvironments":
        return RewardedEnvironments(self)

    def reward_of(self, score: float) -> float:
        """Return the reward for a score of the reward model."""
        value = (finite(score, f"the score of the reward model {self.model}") - self.shift) * self.scale
        return value if self.clamp is None else max(-self.clamp, min(self.clamp, value))

    @property
    def lowest(self) -> float:
        """The least reward for a score of a classifier, which an empty answer gets."""
        if self.value == "logit":
            return -(self.clamp or 0.0)
        return min(self.reward_of(0.0), self.reward_of(1.0))


class RewardedEnvironments(Environments):
    """The environments of the task set, and the reward model."""

    def __init__(self, tasks: RewardModelTasks) -> None:
        self.tasks, self.inner = tasks, tasks.taskset.open()
        label = None if tasks.label is None else (tasks.label, tasks.value)
        self.model = RewardModelClient(tasks.model, tasks.revision, tasks.process, label)

    def make(self, task: Task) -> Environment:
        environments = self.inner if self.tasks.taskset.grades else _Ungraded()
        return RewardedEpisode(self, environments.make(task))

    def use_policy(self, ask: AskPolicy) -> None:
        self.inner.use_policy(ask)

    @property
    def restarts(self) -> int:
        return self.inner.restarts

    async def close(self) -> None:
        self.model.close()
        await called(self.inner.close)


class RewardedEpisode(Environment):
    """An episode of the task set. The conversation is scored after every reply, and the change of its value is the
    reward: the rewards add up to the value of the conversation, wherever it ends."""

    def __init__(self, environments: RewardedEnvironments, inner: Environment) -> None:
        self.model, self.tasks, self.inner = environments.model, environments.tasks, inner
        self.seen = Observation([])
        self.value = self.graded = 0.0  # sums of the rewards of the reward model and of the grader

    async def start(self) -> Observation:
        observation = await self.inner.start()
        _check_role(observation.role)
        self.seen = Observation(list(observation.messages), observation.tools)
        return observation

    async def step(self, reply: Message) -> Step:
        step = await self.inner.step(reply)
        _check_role(step.role, *step.rewards)
        self.seen.messages.append(reply)
        value, scores = await self._valued(reply)
        self.seen.messages += step.messages
        reward = value - self.value + self.tasks.grade_weight * step.reward
        self.value = value
        self.graded += step.reward
        scores = {**self.tasks.inner_scores(step.scores), **scores}
        if self.tasks.taskset.grades:
            scores = {"correct": float(self.graded > 0), **scores, "grade": self.graded}
        return Step(reward, step.done, step.messages, scores)

    async def _valued(self, reply: Message) -> tuple[float, dict[str, float]]:
        """Return the value of the conversation up to the reply, and the scores of the model. A classifier is not asked
        about an empty reply."""
        if self.tasks.label is not None and not text_of(reply["content"]).strip():
            return self.tasks.lowest, {}
        score = await self.model.score(self.seen.messages, self.seen.tools)
        cut = {"reward_model_cut": 1.0} if isinstance(score, CutScore) else {}
        return self.tasks.reward_of(score), {"reward_model": float(score), **cut}

    async def close(self) -> None:
        await self.inner.close()


def _check_role(*names: str | None) -> None:
    """Raise ``ConfigError`` for an episode with roles, of which each has a conversation and a reward."""
    if roles := [name for name in names if name]:
        raise ConfigError(
            f"a reward model scores one conversation, but this episode has roles ({', '.join(roles)}); choose a task "
            "set without roles"
        )


class _Ungraded(Environments):
    """Environments that grade nothing: only the reward model rewards answers."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": 0.0}
