"""What a generator is: tokens in, tokens out. It knows no messages, no rewards and no learner."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from whet.types import Distribution


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How one completion is sampled."""

    max_new_tokens: int
    seed: int = 0  # the completion is a function of weights, prompt and these parameters, whatever runs beside it
    distribution: Distribution = field(default_factory=Distribution)
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()  # kept as the last token of the completion
    stop: tuple[str, ...] = ()  # the completion ends with the token that completes one of these


@dataclass(slots=True)
class Completion:
    """One sampled continuation."""

    tokens: list[int]
    logprobs: list[float]  # [len(tokens)], under the sampling distribution
    versions: tuple[int, int]  # oldest and newest weights that sampled them
    finish_reason: Literal["stop", "length", "aborted"]
    cached: int = 0  # tokens of the prompt whose keys and values were known already


class Generator(Protocol):
    """Samples continuations of token prompts. Many calls of ``sample`` run side by side."""

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """Continue ``prompt``. Requests of one ``session`` (an episode) may share cached state."""
        ...

    async def pause(self) -> None:
        """Return once nothing reads the weights. Requests under way keep their tokens and wait."""
        ...

    async def resume(self, version: int) -> None:
        """Go on with weights ``version``; nothing cached under older weights serves new requests."""
        ...

    async def sleep(self) -> None:
        """Return once it computes nothing and, where it can, holds nothing on a GPU. Requests under way wait, and so do
        new ones."""
        ...

    async def wake(self) -> None:
        """Go on as before ``sleep``, with the same weights."""
        ...

    async def close(self) -> None: ...
