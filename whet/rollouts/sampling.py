"""The settings of sampling, and the budgets of an episode."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from whet.config import Config
from whet.core.types import Distribution
from whet.engines.base import SamplingParams


def _usable(temperature: float) -> float:
    """Logits are divided by it, in single precision."""
    if temperature and not 1e-3 <= temperature <= 1e3:
        raise ValueError(f"expected 0 (the most likely token) or a number from 0.001 to 1000, got {temperature}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_usable)]


class Sampling(Config):
    """How answers are sampled."""

    temperature: Temperature = 1.0
    """0 takes the most likely token each time."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens that hold this much probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Leave out tokens less likely than this share of the most likely one."""
    max_new_tokens: int = Field(256, gt=0)
    """Longest reply of one turn, in tokens."""
    max_turns: int = Field(1, gt=0)
    """Longest episode, in replies, over all its branches."""
    max_seconds: float | None = Field(None, gt=0)
    """Longest episode, by the clock: what takes longer is truncated."""
    max_prompt_tokens: int = Field(2048, gt=0)
    """A task with a longer prompt is an error."""
    max_observation_tokens: int = Field(1024, gt=0)
    """Longest that an environment says between two replies; of what is longer, the middle is left out."""
    max_episode_tokens: int | None = Field(None, gt=1)
    """Longest episode, with its prompt: what gets longer is truncated. By default all that the turns can add up to."""
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = ()
    """Texts that end a reply."""
    thinking: Literal["on", "off"] | None = None
    """Begin each reply with ``<think>``, or with empty thoughts; None: as the chat template does."""
    thinking_budget: int | None = Field(None, gt=0)
    """Tokens after which thoughts are ended with ``</think>``, which is not trained, and the answer follows."""

    @model_validator(mode="after")
    def _leaves_room_for_a_reply(self) -> Self:
        if self.max_episode_tokens is not None and self.max_episode_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"max_episode_tokens = {self.max_episode_tokens} leaves no room for a reply after "
                f"max_prompt_tokens = {self.max_prompt_tokens}"
            )
        return self

    @property
    def longest(self) -> int:
        """Most tokens of an episode: its prompt, its replies and what is said between them."""
        between = (self.max_turns - 1) * self.max_observation_tokens
        tokens = self.max_prompt_tokens + self.max_turns * self.max_new_tokens + between
        return tokens if self.max_episode_tokens is None else min(tokens, self.max_episode_tokens)

    @property
    def mode(self) -> str:
        """How replies think, in the names of metrics; empty where nothing says so."""
        return "budget" if self.thinking_budget is not None else self.thinking or ""

    @property
    def distribution(self) -> Distribution:
        """What the learner's log-probs are taken under; greedy sampling has none, so temperature 1."""
        return (
            Distribution(self.temperature, self.top_k, self.top_p, self.min_p) if self.temperature else Distribution()
        )

    def params(self, seed: int, stop_token_ids: tuple[int, ...], tokens: int) -> SamplingParams:
        """What the generator is asked for, after ``tokens`` of the episode."""
        return SamplingParams(
            max_new_tokens=min(self.max_new_tokens, self.longest - tokens),
            seed=seed,
            distribution=self.distribution,
            greedy=self.temperature == 0,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
        )


class Limits(Config):
    """What one environment of a blend changes of ``Sampling``, whose limits are the highest; None: as there."""

    max_new_tokens: int | None = Field(None, gt=0)
    max_turns: int | None = Field(None, gt=0)
    max_seconds: float | None = Field(None, gt=0)
    max_prompt_tokens: int | None = Field(None, gt=0)
    max_observation_tokens: int | None = Field(None, gt=0)
    max_episode_tokens: int | None = Field(None, gt=1)
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] | None = None
    thinking: Literal["on", "off"] | None = None
    thinking_budget: int | None = Field(None, gt=0)

    def under(self, sampling: Sampling) -> Sampling:
        """Return the sampling with these changes. Raises ``ValidationError`` where they don't fit together."""
        return Sampling(**(sampling.model_dump() | self.model_dump(exclude_none=True)))

    def problems(self, sampling: Sampling) -> Iterator[str]:
        """Yield what is higher than there, or leaves no room for a reply."""
        for name, value in self.model_dump(exclude_none=True).items():
            most = getattr(sampling, name)
            if name.startswith("max_") and most is not None and value > most:
                yield f"sampling.{name} = {value} is more than that of the run, sampling.{name} = {most}"
        try:
            self.under(sampling)
        except ValidationError as error:
            yield from (f"sampling: {one['msg'].removeprefix('Value error, ')}" for one in error.errors())
