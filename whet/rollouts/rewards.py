"""Composed rewards: what an episode earns, from the environment's grade and from what the episode itself shows. Applied
after grading and before filters, in training; an evaluation reports the environment's own reward.

    rewards:
      type: sum
      of:
        task: {type: score}
        brevity: {type: length, free: 100, limit: 200, weight: -0.5}
"""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.config import Component, Config
from whet.core.types import Episode, Message, Trajectory

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
    """Base of all components; subclass it for your own and name it by its dotted path."""

    weight: float = 1.0
    """Times this; negative: a penalty."""

    @abstractmethod
    def value(self, episode: Episode) -> float:
        """What the episode is worth by this component, before its weight."""

    def parts(self) -> Iterator[tuple[str, "Reward"]]:
        """The components inside, by name."""
        yield from ()

    def __call__(self, episode: Episode) -> float:
        return self.weight * self.value(episode)

    def named(self, prefix: str = "rewards") -> Iterator[tuple[str, "Reward"]]:
        """All components below this one, by the names of their metrics."""
        for name, part in self.parts():
            yield f"{prefix}/{name}", part
            yield from part.named(f"{prefix}/{name}")


Of = Annotated[Reward, Component(REWARDS)]


def compose(reward: Reward, episode: Episode) -> None:
    """Pay the episode what ``reward`` says. Its scores keep what the environment paid (``graded``) and what each
    component came to, weighted. The difference is credited to the last reply."""
    if reward == Score():
        return
    scores = {name: part(episode) for name, part in reward.named()}
    total = reward(episode)
    trained = [span for span in episode.spans if span.trained]
    if trained:
        trained[-1].reward += total - episode.reward
    episode.scores |= {"graded": episode.reward, **scores}
    episode.reward = total


class Score(Reward):
    """What the environment says: its reward, or one of its scores."""

    name: str = "reward"
    """``reward``, or the name of a score."""
    missing: float = 0.0
    """The value where an episode has no such score."""

    def value(self, episode: Episode) -> float:
        return episode.reward if self.name == "reward" else episode.scores.get(self.name, self.missing)


class Sum(Reward):
    """The sum of components."""

    of: dict[str, Of] = Field(min_length=1)
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
    """One component, paid only where another one passes: style never earns what substance didn't."""

    when: Of
    """The component that decides."""
    above: float = 0.5
    """It passes above this."""
    then: Of
    """What is paid where it passes."""
    otherwise: float = 0.0
    """What is paid where it doesn't."""

    def parts(self) -> Iterator[tuple[str, Reward]]:
        yield from (("when", self.when), ("then", self.then))

    def value(self, episode: Episode) -> float:
        return self.then(episode) if self.when(episode) > self.above else self.otherwise


class Clip(Reward):
    """A component held between two bounds."""

    of: Of
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
    """0 up to ``free`` sampled tokens, then linearly up to 1 at ``limit`` and beyond; over all turns."""

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
    """The share of the replies' runs of ``words`` words that were there before; 0 where there is no run."""

    words: int = Field(4, ge=1)

    def value(self, episode: Episode) -> float:
        said = _said(episode).split()
        runs = [tuple(said[i : i + self.words]) for i in range(len(said) - self.words + 1)]
        return 1 - len(set(runs)) / len(runs) if runs else 0.0


class Language(Reward):
    """The share of the replies' letters that are not of the script. Letters of formulas count as Latin."""

    script: Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "cjk", "hangul"]

    def value(self, episode: Episode) -> float:
        letters = [letter for letter in _said(episode) if letter.isalpha()]
        own = sum(unicodedata.name(letter, "").startswith(self.script.upper()) for letter in letters)
        return 1 - own / len(letters) if letters else 0.0


class MalformedCalls(Reward):
    """The number of tool calls that could not be read, at most ``most``."""

    most: int = Field(1, ge=1)

    def value(self, episode: Episode) -> float:
        messages = [message for branch in episode.branches for message in _replies(branch, episode.usage.turns)]
        found = sum(len(message.get("malformed_calls", ())) for message in messages)
        return float(min(found, self.most))


def _said(episode: Episode) -> str:
    """All that the model said, thoughts included."""
    replies = [message for branch in episode.branches for message in _replies(branch, episode.usage.turns)]
    return "\n".join(f"{m.get('reasoning_content') or ''}\n{m['content']}" for m in replies)


def _replies(branch: Trajectory, turns: int) -> list[Message]:
    """The branch's own replies: the last ones, for a prompt may show examples of replies."""
    own = min(turns, sum(span.trained for span in branch.spans))
    return [message for message in branch.messages if message["role"] == "assistant"][-own:] if own else []
