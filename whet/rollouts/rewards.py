"""Composed rewards: the reward of an episode, from the environment's grade and from properties of the episode. Applied
after grading and before filters, in training only; an evaluation reports the environment's reward.

    rewards:
      type: sum
      of:
        task: {type: score}
        brevity: {type: length, free: 100, limit: 200, weight: -0.5}
"""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.base.errors import ConfigError
from whet.config import Component, Config
from whet.config.base import within
from whet.config.issues import did_you_mean
from whet.core.content import text_of
from whet.core.types import Episode, Message, Status, Trajectory
from whet.core.words import words_in
from whet.processes.user_code import place_of
from whet.tasks.base import finite

REWARDS = {
    name: f"whet.rollouts.rewards:{kind}"
    for name, kind in {
        "score": "Score",
        "sum": "Sum",
        "product": "Product",
        "gate": "Gate",
        "clip": "Clip",
        "length": "Length",
        "repetition": "Repetition",
        "language": "Language",
        "malformed_calls": "MalformedCalls",
    }.items()
}


class Reward(Config, ABC):
    """Base of all components. Subclass it for your own and name the subclass by its dotted path."""

    weight: float = 1.0
    """A factor of the value; negative for a penalty."""

    @abstractmethod
    def value(self, episode: Episode) -> float:
        """Return the value of the episode, before the weight."""

    def parts(self) -> Iterator[tuple[str, "Reward"]]:
        """Yield the components of this one, with their names."""
        yield from ()

    def __call__(self, episode: Episode) -> float:
        return self.weight * finite(self.value(episode), f"what {place_of(type(self), 'value')} returned")

    def named(self, prefix: str = "rewards") -> Iterator[tuple[str, "Reward"]]:
        """Yield all components below this one, with the names of their metrics."""
        for name, part in self.parts():
            yield f"{prefix}/{name}", part
            yield from part.named(f"{prefix}/{name}")


AnyReward = Annotated[Reward, Component(REWARDS)]


def compose(reward: Reward, episode: Episode, declared: Collection[str] = ()) -> None:
    """Replace the episode's reward by ``reward``. Its scores keep the environment's reward (``graded``) and the
    weighted value of each component. The difference is credited to the last reply. ``declared``: the names that the
    task set declares. Raises ``ConfigError`` for a score that is neither declared nor in a completed episode."""
    if reward == Score():
        return
    if episode.rewards:
        raise ConfigError("rewards can't be composed for an environment with rewards by role; leave out `rewards`")
    if not declared and episode.status is Status.COMPLETED:
        _check_present(reward, episode)
    scores = {name: part(episode) for name, part in reward.named()}
    total = reward(episode)
    trained = [span for span in episode.spans if span.trained]
    if trained:
        trained[-1].reward += total - episode.reward
    episode.scores |= {"graded": episode.reward, **scores}
    episode.reward = total


def _check_present(reward: Reward, episode: Episode) -> None:
    """Raise ``ConfigError`` for a score without ``missing`` that the episode lacks."""
    names = ("reward", *episode.scores)
    for part in within(reward):
        if isinstance(part, Score) and part.missing is None and part.name not in names:
            raise ConfigError(
                f"rewards: the task set does not declare its scores, and a completed episode has no score "
                f"{part.name!r}, only {', '.join(names)}.{did_you_mean(part.name, names)} If some episodes have it and "
                "others don't, set `missing` to the value of these"
            )


class Score(Reward):
    """The environment's reward, or one of its scores."""

    name: str = "reward"
    """``reward``, or the name of a score."""
    missing: float | None = None
    """The value for an episode without this score. None: 0 for a score that the task set declares and for a truncated
    episode; otherwise the run ends with an error, because the name may be mistyped."""

    def value(self, episode: Episode) -> float:
        return episode.reward if self.name == "reward" else episode.scores.get(self.name, self.missing or 0.0)


class Sum(Reward):
    """The sum of components."""

    of: dict[str, AnyReward] = Field(min_length=1)
    """The components by name."""

    def parts(self) -> Iterator[tuple[str, Reward]]:
        yield from self.of.items()

    def value(self, episode: Episode) -> float:
        return sum(part(episode) for part in self.of.values())


class Product(Sum):
    """The product of components."""

    def value(self, episode: Episode) -> float:
        total = 1.0
        for part in self.of.values():
            total *= part(episode)
        return total


class Gate(Reward):
    """One component, which counts only if another one passes: style is never rewarded without substance."""

    when: AnyReward
    """The component that decides."""
    above: float = 0.5
    """The component passes above this value."""
    then: AnyReward
    """The component that is used if it passes."""
    otherwise: float = 0.0
    """The value if it doesn't pass."""

    def parts(self) -> Iterator[tuple[str, Reward]]:
        yield from (("when", self.when), ("then", self.then))

    def value(self, episode: Episode) -> float:
        return self.then(episode) if self.when(episode) > self.above else self.otherwise


class Clip(Reward):
    """A component, clipped between two bounds."""

    of: AnyReward
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "Clip":
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self

    def parts(self) -> Iterator[tuple[str, Reward]]:
        yield "of", self.of

    def value(self, episode: Episode) -> float:
        return max(self.low, min(self.high, self.of(episode)))


class Length(Reward):
    """0 up to ``free`` sampled tokens, then linear up to 1 at ``limit`` and beyond, over all turns."""

    free: int = Field(ge=0)
    limit: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "Length":
        if self.free >= self.limit:
            raise ValueError("free must be below limit")
        return self

    def value(self, episode: Episode) -> float:
        return min(max((episode.trained_tokens - self.free) / (self.limit - self.free), 0.0), 1.0)


class Repetition(Reward):
    """The share of the replies' n-grams of ``words`` words that occurred before; 0 if there are no n-grams."""

    words: int = Field(4, ge=1)

    def value(self, episode: Episode) -> float:
        text = words_in(_reply_text(episode))
        ngrams = [tuple(text[i : i + self.words]) for i in range(len(text) - self.words + 1)]
        return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class Language(Reward):
    """The share of the replies' letters that don't belong to the script. Letters in formulas count as Latin."""

    script: Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "cjk", "hangul"]

    def value(self, episode: Episode) -> float:
        letters = [letter for letter in _reply_text(episode) if letter.isalpha()]
        matching = sum(unicodedata.name(letter, "").startswith(self.script.upper()) for letter in letters)
        return 1 - matching / len(letters) if letters else 0.0


class MalformedCalls(Reward):
    """The number of tool calls that could not be parsed, at most ``most``."""

    most: int = Field(1, ge=1)

    def value(self, episode: Episode) -> float:
        messages = [message for branch in episode.branches for message in _replies(branch, episode.usage.turns)]
        malformed = sum(len(message.get("malformed_calls", ())) for message in messages)
        return float(min(malformed, self.most))


def _reply_text(episode: Episode) -> str:
    """Return the text of all replies, including thoughts."""
    replies = [message for branch in episode.branches for message in _replies(branch, episode.usage.turns)]
    return "\n".join(f"{m.get('reasoning_content') or ''}\n{text_of(m['content'])}" for m in replies)


def _replies(branch: Trajectory, turns: int) -> list[Message]:
    """Return the branch's own replies: the last ones, because a prompt may contain examples of replies."""
    count = min(turns, sum(span.trained for span in branch.spans))
    return [message for message in branch.messages if message["role"] == "assistant"][-count:] if count else []
