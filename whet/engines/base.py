"""The interface of generators: tokens in, tokens out. It knows no messages, no rewards and no learner.

    episode ──prompt tokens──► Router (replicas > 1) ──► TorchGenerator: decoder, engine_model, in this process
            ◄──Completion────                        ├─► VllmGenerator ──────► vLLM in processes of its own
                                                     └─► HostedGenerator ──cluster──► the same on another node

For example: ``Completion(tokens=[57, 2], logprobs=[-0.3, 0.0], versions=(3, 3), finish_reason="stop")``.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from whet.base.errors import ConfigError, WhetError
from whet.core.types import Distribution
from whet.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from whet.core.expert_ids import Ids

M = TypeVar("M", covariant=True)


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How one completion is sampled."""

    max_new_tokens: int
    seed: int = 0  # the completion is a function of weights, prompt and these parameters, whatever runs beside it
    distribution: Distribution = field(default_factory=Distribution)
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()  # kept as the last token of the completion
    stop: tuple[str, ...] = ()  # the completion ends with the token that completes one of these


def check_request(prompt: Sequence[int], params: SamplingParams, vocabulary: int, *, stops: bool) -> None:
    """Raise ``WhetError`` for what no engine can meet: tokens outside its ``vocabulary``, or stop texts where it has no
    tokenizer (``stops`` is false)."""
    d = params.distribution
    if not prompt:
        raise WhetError("cannot sample from an empty prompt: give at least one token (the BOS token, for example)")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise WhetError(f"the prompt has token {max(prompt)} or {min(prompt)}, outside the model's {vocabulary} tokens")
    if params.stop and not stops:
        raise ConfigError("stop strings need a tokenizer: give the generator one, or use stop_token_ids")
    if not params.greedy and not (d.temperature > 0 and d.top_k >= 0 and 0 < d.top_p <= 1 and 0 <= d.min_p <= 1):
        raise ConfigError(f"{d} is not a valid distribution; for the likeliest token at each step set greedy")


@dataclass(slots=True)
class Completion:
    """One sampled continuation."""

    tokens: list[int]
    logprobs: list[float]  # [len(tokens)], under the sampling distribution
    versions: tuple[int, int]  # oldest and newest weights that sampled them
    finish_reason: Literal["stop", "length", "aborted"]
    cached: int = 0  # tokens of the prompt whose keys and values were known already
    experts: "Ids | None" = None  # [prompt + tokens, layers, k], where it records them; the last token has none


def prompt_metrics(tokens: int, cached: int) -> Metrics:
    """Return the metrics of so many tokens of prompts, of which so many were ``cached``. Which ones are depends on what
    runs at the same time, so the names are those of times."""
    metrics = Metrics().sum("time/generator/prompt_tokens", tokens)
    return metrics.mean("time/generator/cached_share", cached, tokens)


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

    async def sleep(self, new_weights: bool = False) -> None:
        """Return once it computes nothing and, where it can, holds nothing on a GPU. Requests under way wait, and so do
        new ones. With ``new_weights`` a refit comes first when it wakes."""
        ...

    async def wake(self, new_weights: bool = False) -> None:
        """Go on as before ``sleep``, with the same weights. With ``new_weights`` a refit follows, and requests under
        way wait for it."""
        ...

    async def close(self) -> None: ...


class OpenModel(Protocol):
    """The model of a generator in this process, while its weights are replaced."""

    def load(self, named: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy some of the weights (Hugging Face names), cast to its type."""
        ...

    def check_complete(self) -> None:
        """Raise ``RefitError`` where something is missing, unexpected or of another shape."""
        ...

    def named_weights(self) -> "Iterable[tuple[str, Tensor]]":
        """Return what it holds of what came."""
        ...

    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return log-probs (temperature 1) of ``tokens`` after ``prompt``, through the path that sampling takes."""
        ...


class Engine(Protocol):
    """A generator whose model lives in other processes, each of which has a part of every matrix."""

    @property
    def ranks(self) -> int:
        """The number of these processes."""
        ...

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        """Call ``method`` of the object that ``module:Class`` makes of the model, in each process. Arguments and
        answers are plain data."""
        ...

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """See ``Generator``."""
        ...


class Refittable(Generator, Protocol[M]):
    """A generator that takes new weights. ``M`` is ``OpenModel`` where they are copied to it in this process,
    ``Engine`` where it is called to fetch them."""

    @property
    def dtype(self) -> "torch.dtype":
        """The type of its weights."""
        ...

    def tally(self) -> Metrics:
        """Return what was counted since the last call: at least ``prompt_metrics``."""
        ...

    def refit(self, version: int, adapter: bool = False) -> AbstractAsyncContextManager[Sequence[M]]:
        """Open the models of all replicas for a complete set of weights, or for a LoRA ``adapter`` over them.

        >>> async with generator.refit(version) as models:
        ...     for model in models:
        ...         model.load(named)

        Inside, nothing is sampled: requests, also new ones, wait. At the end they go on with ``version``, and nothing
        cached under older weights serves new requests. After an error no request is served until a refit succeeds.
        """
        ...
