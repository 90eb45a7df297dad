"""The settings of sampling, and the budgets of an episode."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from whet.config import Config, SettingsError
from whet.core.types import Distribution
from whet.engines.base import SamplingParams


def _usable(temperature: float) -> float:
    """Return the temperature. Logits are divided by it in single precision, which limits its range."""
    if temperature and not 1e-3 <= temperature <= 1e3:
        raise ValueError(f"expected 0 (the most likely token) or a number from 0.001 to 1000, got {temperature}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_usable)]


class Sampling(Config):
    """Settings of how replies are sampled."""

    temperature: Temperature = 1.0
    """0 always takes the most likely token."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities sum to this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Exclude tokens less likely than this share of the most likely token's probability."""
    max_new_tokens: int = Field(256, gt=0)
    """Maximum length of one reply, in tokens."""
    max_turns: int = Field(1, gt=0)
    """Maximum number of replies in an episode, over all its branches."""
    max_seconds: float | None = Field(None, gt=0)
    """Maximum duration of an episode; a longer one is truncated."""
    max_prompt_tokens: int = Field(2048, gt=0)
    """A task with a longer prompt is an error."""
    max_observation_tokens: int = Field(1024, gt=0)
    """Maximum length of an environment's messages between two replies; the middle of longer ones is left out."""
    max_episode_tokens: int | None = Field(None, gt=1)
    """Maximum length of an episode, or of each of its branches, including the prompt; a longer one is truncated. By
    default the sum over all turns."""
    max_total_tokens: int | None = Field(None, gt=1)
    """Maximum number of tokens of all branches of an episode together, each with its context; None: no limit."""
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = ()
    """Strings that end a reply."""
    thinking: Literal["on", "off"] | None = None
    """Start each reply with ``<think>``, or with empty thoughts; None: as the chat template does."""
    thinking_budget: int | None = Field(None, gt=0)
    """Number of tokens after which thoughts are ended with ``</think>``, which is not trained, before the answer."""

    @model_validator(mode="after")
    def _leaves_room_for_a_reply(self) -> Self:
        for name in ("max_episode_tokens", "max_total_tokens"):
            most = getattr(self, name)
            if most is not None and most <= self.max_prompt_tokens:
                raise ValueError(
                    f"{name} = {most} leaves no room for a reply after max_prompt_tokens = {self.max_prompt_tokens}"
                )
        return self

    @property
    def longest(self) -> int:
        """Maximum number of tokens in an episode: its prompt, its replies and the messages between them."""
        between = (self.max_turns - 1) * self.max_observation_tokens
        tokens = self.max_prompt_tokens + self.max_turns * self.max_new_tokens + between
        return tokens if self.max_episode_tokens is None else min(tokens, self.max_episode_tokens)

    @property
    def mode(self) -> str:
        """The thinking mode, as in the names of metrics; empty if it is not set."""
        return "budget" if self.thinking_budget is not None else self.thinking or ""

    @property
    def controls_thinking(self) -> bool:
        """Return whether these settings open or end thoughts, which are then separated from every reply."""
        return self.thinking is not None or self.thinking_budget is not None

    @property
    def distribution(self) -> Distribution:
        """The distribution under which log-probs are computed. Greedy sampling uses temperature 1 here."""
        return (
            Distribution(self.temperature, self.top_k, self.top_p, self.min_p) if self.temperature else Distribution()
        )

    def params(self, seed: int, stop_token_ids: tuple[int, ...], tokens: int) -> SamplingParams:
        """Return the sampling parameters of the next reply, given the tokens used so far in the episode."""
        return SamplingParams(
            max_new_tokens=min(self.max_new_tokens, self.longest - tokens),
            seed=seed,
            distribution=self.distribution,
            greedy=self.temperature == 0,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
        )


class Limits(Config):
    """Changes to ``Sampling`` for one environment of a blend, whose limits may only be lowered; None: unchanged."""

    max_new_tokens: int | None = Field(None, gt=0)
    max_turns: int | None = Field(None, gt=0)
    max_seconds: float | None = Field(None, gt=0)
    max_prompt_tokens: int | None = Field(None, gt=0)
    max_observation_tokens: int | None = Field(None, gt=0)
    max_episode_tokens: int | None = Field(None, gt=1)
    max_total_tokens: int | None = Field(None, gt=1)
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] | None = None
    thinking: Literal["on", "off"] | None = None
    thinking_budget: int | None = Field(None, gt=0)

    def under(self, sampling: Sampling) -> Sampling:
        """Return ``sampling`` with these changes. Raises ``SettingsError`` if they are inconsistent."""
        return Sampling(**(sampling.model_dump() | self.model_dump(exclude_none=True)))

    def problems(self, sampling: Sampling) -> Iterator[str]:
        """Yield each limit that is higher than in ``sampling``, or that leaves no room for a reply."""
        run = sampling.model_dump()
        for name, value in self.model_dump(exclude_none=True).items():
            most = run[name]
            if name.startswith("max_") and most is not None and value > most:
                yield f"sampling.{name} = {value} is more than that of the run, sampling.{name} = {most}"
        try:
            self.under(sampling)
        except SettingsError as error:
            yield from (f"sampling: {issue.message}" for issue in error.issues)
