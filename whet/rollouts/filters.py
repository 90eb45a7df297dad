"""What happens to a group between grading and learning. A filter returns the group, changed or not, or None to drop it.
Filters run in the order in which the recipe lists them. Whole groups are dropped, never single rows: dropping rows
would bias the baseline."""

from abc import ABC, abstractmethod
from dataclasses import replace

from pydantic import Field, model_validator

from whet.config import Config
from whet.core.types import Episode, Group, Status
from whet.rollouts.pass_rate import pass_rate

FILTERS = {
    "dynamic_sampling": "whet.rollouts.filters:DynamicSampling",
    "pass_rate": "whet.rollouts.filters:PassRate",
    "overlong_shaping": "whet.rollouts.filters:OverlongShaping",
    "overlong_filter": "whet.rollouts.filters:OverlongFilter",
    "best_and_worst": "whet.rollouts.filters:BestAndWorst",
}


class Filter(Config, ABC):
    """Base of all filters; subclass it for your own and name it by its dotted path."""

    @abstractmethod
    def __call__(self, group: Group) -> Group | None:
        """The group, changed or not; None drops it."""


class DynamicSampling(Filter):
    """Drop groups whose rewards have no spread: they teach nothing (DAPO, arXiv 2503.14476). The source then samples
    further tasks until the step is full. List it before any shaping, so that spread is judged on the plain reward."""

    def __call__(self, group: Group) -> Group | None:
        rewards = {episode.reward for episode in group.episodes}
        return group if len(rewards) > 1 else None


class PassRate(Filter):
    """Keep tasks of medium difficulty: groups whose share of right answers is in ``low`` .. ``high`` (PRIME, arXiv
    2502.01456). Right is an answer whose score ``correct``, or else reward, is above ``threshold``."""

    low: float = Field(0.2, ge=0, le=1)
    high: float = Field(0.8, ge=0, le=1)
    threshold: float = 0.5

    @model_validator(mode="after")
    def _ordered(self) -> "PassRate":
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self

    def __call__(self, group: Group) -> Group | None:
        return group if self.low <= pass_rate(group, self.threshold) <= self.high else None


class OverlongShaping(Filter):
    """Soft punishment of long answers (DAPO, arXiv 2503.14476): nothing up to ``limit - buffer`` trained tokens, then
    linearly down to ``-penalty`` at ``limit`` and beyond. All turns of an episode count."""

    limit: int = Field(gt=0)
    """Length L in tokens."""
    buffer: int = Field(gt=0)
    """Length B over which the punishment grows."""
    penalty: float = Field(1.0, ge=0)

    def __call__(self, group: Group) -> Group | None:
        shaped = []
        for episode in group.episodes:
            over = (episode.trained_tokens - (self.limit - self.buffer)) / self.buffer
            shaping = -self.penalty * min(max(over, 0.0), 1.0)
            scores = episode.scores | {"overlong": shaping}
            shaped.append(replace(episode, reward=episode.reward + shaping, scores=scores))
        return replace(group, episodes=shaped)


class OverlongFilter(Filter):
    """Truncated answers train no token but still count in their group's baseline (DAPO, arXiv 2503.14476)."""

    def __call__(self, group: Group) -> Group | None:
        masked = [_untrained(e) if e.status is Status.TRUNCATED else e for e in group.episodes]
        return replace(group, episodes=masked)


class BestAndWorst(Filter):
    """Keep the answer with the highest reward and the one with the lowest, the first of equals, as a preference pair;
    drop groups without spread (online DPO, arXiv 2402.04792). An episode that was cut before its first reply gave no
    answer, so it is in no pair."""

    def __call__(self, group: Group) -> Group | None:
        answers = [episode for episode in group.episodes if episode.branches]
        best = max(answers, key=lambda episode: episode.reward, default=None)
        worst = min(answers, key=lambda episode: episode.reward, default=None)
        if best is None or worst is None or best.reward == worst.reward:
            return None
        return replace(group, episodes=[best, worst])


def _untrained(episode: Episode) -> Episode:
    masked = [replace(b, spans=[replace(span, trained=False) for span in b.spans]) for b in episode.branches]
    return replace(episode, branches=masked)
