"""The interface of engines: tokens in, tokens out; weights in.

    episode ──prompt tokens──► Router (replicas > 1) ──► TorchGenerator: decoder, engine_model, in this process
            ◄──Completion────                        ├─► VllmGenerator ──────► vLLM in separate processes
                                                     └─► RemoteGenerator ──cluster──► the same on another node

For example: ``Completion(tokens=[57, 2], logprobs=[-0.3, 0.0], versions=(3, 3), finish_reason="stop")``.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from whet.base.errors import ConfigError, DataError, WhetError
from whet.core.types import Distribution
from whet.metrics import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from whet.core.expert_ids import Ids


M = TypeVar("M", covariant=True)
FinishReason = Literal["stop", "length", "aborted"]
_ROUNDING = 0.01  # nats by which a log-prob may be above 0
_MOST_TOKENS = 2**31  # ids are int32 in a batch, which is checked against the model's own vocabulary


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """The sampling parameters of one completion."""

    max_new_tokens: int
    seed: int = 0  # the completion is a function of weights, prompt and these parameters, not of other requests
    distribution: Distribution = field(default_factory=Distribution)
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()  # included as the last token of the completion
    stop: tuple[str, ...] = ()  # the completion ends with the token that completes one of these
    images: tuple[str, ...] = ()  # data URLs of the images whose placeholders the prompt has; see whet.core.images
    likeliest: int = 0  # the number of tokens in ``Completion.likeliest``, if the engine reports them
    among: tuple[int, ...] = ()  # the tokens in ``Completion.likeliest`` instead, however unlikely
    adapter: str | None = None  # a frozen adapter of ``generator.adapters``, or "base" without any; None: the policy


def check_request(prompt: Sequence[int], params: SamplingParams, vocabulary: int, *, stops: bool) -> None:
    """Raise ``WhetError`` for a request that no engine can serve: tokens outside its ``vocabulary``, or stop strings
    without a tokenizer (``stops`` is false)."""
    d = params.distribution
    if not prompt:
        raise WhetError("cannot sample from an empty prompt; give at least one token, such as the BOS token")
    if (min(prompt) < 0 and not params.images) or max(prompt) >= vocabulary:
        raise WhetError(f"the prompt has token {max(prompt)} or {min(prompt)}, outside the model's {vocabulary} tokens")
    if params.stop and not stops:
        raise ConfigError("stop strings need a tokenizer; give the generator one, or use stop_token_ids")
    if not params.greedy and not (d.temperature > 0 and d.top_k >= 0 and 0 < d.top_p <= 1 and 0 <= d.min_p <= 1):
        raise ConfigError(f"{d} is not a valid distribution; for the most likely token at each step set greedy")


@dataclass(slots=True)
class Completion:
    """One sampled continuation."""

    tokens: list[int]
    logprobs: list[float]  # [len(tokens)], under the sampling distribution
    versions: tuple[int, int]  # oldest and newest version of the weights that sampled them
    finish_reason: FinishReason
    cached: int = 0  # prompt tokens that were in the prefix cache
    likeliest: list[dict[int, float]] = field(default_factory=list)  # per token: the likeliest tokens, or the tokens
    # that were asked for, and their log-probs at temperature 1 without filters
    experts: "Ids | None" = None  # [prompt + tokens, layers, k], if recorded; the last token has none


def check_completion(completion: object, prompt: Sequence[int], params: SamplingParams, engine: object) -> Completion:
    """Return what ``engine`` sampled. Raises ``DataError`` for what no engine may return to a request: a reply that was
    cut would count as a whole one, and a number that is not finite would be compared with the learner's."""
    problem: str | None = f"a {type(completion).__name__}, not a Completion"
    if isinstance(completion, Completion):
        problem = _problem(completion, len(prompt), params.max_new_tokens)
        if problem is None:
            return completion
    raise DataError(f"sample of the engine {type(engine).__name__} returned {problem}")


def _problem(completion: Completion, prompt: int, most: int) -> str | None:
    """Return in words what is wrong with a completion of ``prompt`` tokens by at most ``most``."""
    tokens, logprobs, versions = completion.tokens, completion.logprobs, completion.versions
    likeliest, experts = completion.likeliest, completion.experts
    if not all(isinstance(column, list | tuple) for column in (tokens, logprobs, likeliest)):
        return "tokens, logprobs or likeliest that are not a list"
    if completion.finish_reason not in (reasons := get_args(FinishReason)):
        return f"the finish_reason {completion.finish_reason!r}; it must be one of {', '.join(reasons)}"
    if len(tokens) != len(logprobs):
        return f"{len(tokens)} tokens with {len(logprobs)} log-probs"
    if len(tokens) > most:
        return f"{len(tokens)} tokens where max_new_tokens is {most}"
    if not {*map(type, tokens)} <= {int}:
        return "a token that is not an int"
    if min(tokens, default=0) < 0 or max(tokens, default=0) >= _MOST_TOKENS:
        return f"token {min(tokens)} or {max(tokens)}, which no vocabulary has"
    if not {*map(type, logprobs)} <= {float, int} or not math.isfinite(sum(logprobs)):
        return "a log-prob that is not a finite number"
    if max(logprobs, default=0) > _ROUNDING:
        return f"the log-prob {max(logprobs):.3g}, which is above 0"
    if (
        not isinstance(versions, list | tuple)
        or [*map(type, versions)] != [int, int]
        or not 0 <= versions[0] <= versions[1]
    ):
        return f"the versions {versions!r}; they must be the oldest and the newest version of the weights, as two ints"
    if type(completion.cached) is not int or not 0 <= completion.cached <= prompt:
        return f"{completion.cached!r} cached tokens of a prompt of {prompt}"
    if likeliest and (len(likeliest) != len(tokens) or not all(isinstance(each, dict) for each in likeliest)):
        return f"likeliest that doesn't have one dict for each of {len(tokens)} tokens"
    if experts is not None and getattr(experts, "shape", ())[:1] != (prompt + len(tokens),):
        return f"experts that don't have one row for each of {prompt + len(tokens)} tokens"
    return None


def prompt_metrics(tokens: int, cached: int) -> Metrics:
    """Return the metrics of ``tokens`` prompt tokens, of which ``cached`` were in the prefix cache. The numbers depend
    on timing, so their names begin with ``time/``."""
    metrics = Metrics().sum("time/generator/prompt_tokens", tokens)
    return metrics.mean("time/generator/cached_share", cached, tokens)


class OpenModel(Protocol):
    """The model of an engine in this process, while its weights are replaced."""

    def load(self, named: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy some of the weights (Hugging Face names), cast to the model's dtype."""
        ...

    def check_complete(self) -> None:
        """Raise ``RefitError`` if a tensor is missing, unexpected or of another shape."""
        ...

    def named_weights(self) -> "Iterable[tuple[str, Tensor]]":
        """Return the model's copies of the loaded tensors."""
        ...

    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return log-probs (temperature 1) of ``tokens`` after ``prompt``, computed by the decode path of sampling."""
        ...


class EngineRanks(Protocol):
    """The processes of an engine, each of which has a part of every matrix, while their weights are replaced."""

    @property
    def ranks(self) -> int:
        """The number of these processes."""
        ...

    async def call(self, target: str, method: str, *args: object) -> list[Any]:
        """Call ``method`` of the object that ``module:Class`` creates from the model, in each process. Arguments and
        results are plain data."""
        ...

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """See ``Engine``."""
        ...


class Engine(Protocol[M]):
    """Samples continuations of token prompts, and accepts new weights. ``M`` is ``OpenModel`` if the weights are copied
    to it in this process, ``EngineRanks`` if its processes fetch them.

    This is all that a run needs of an engine; some settings need a ``PausableEngine``."""

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of its weights."""
        ...

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """Continue ``prompt``. Many calls run concurrently. Requests of one ``session`` (an episode) may share cached
        state."""
        ...

    def refit(self, version: int, adapter: bool = False) -> AbstractAsyncContextManager[Sequence[M]]:
        """Open the models of all replicas for a complete set of weights, or for a LoRA ``adapter`` over them.

        >>> async with engine.refit(version) as models:
        ...     for model in models:
        ...         model.load(named)

        Inside the context nothing is sampled: requests in flight and new ones wait. Afterwards they continue with
        ``version``, and new requests use no cache entries of older weights. After an error no request is served until a
        refit succeeds.
        """
        ...

    def tally(self) -> Metrics:
        """Return the metrics since the last call: at least ``prompt_metrics``."""
        ...

    async def close(self) -> None:
        """Release everything. Requests in flight return their tokens so far, with finish reason ``aborted``."""
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that also hands out tokens while it samples, for clients that asked for a stream. Optional."""

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """Like ``Engine.sample``. ``sampled`` is called in the event loop with the new tokens of the completion, in
        their order; the last ones may come with the completion only."""
        ...


@runtime_checkable
class PausableEngine(Engine[M], Protocol[M]):
    """An engine that can also stop between refits: for ``rollouts.partial``, ``generator.replicas`` above 1,
    ``generator.on_cluster`` and ``devices.placement=colocated``."""

    async def pause(self) -> None:
        """Return once the weights are not read any more. Requests in flight keep their tokens and wait."""
        ...

    async def resume(self, version: int) -> None:
        """Continue with weights ``version``; new requests use no cache entries of older weights."""
        ...

    async def sleep(self, new_weights: bool = False) -> None:
        """Return once the engine computes nothing and, if possible, uses no GPU memory. Requests in flight and new
        ones wait. With ``new_weights`` it is refitted when it wakes."""
        ...

    async def wake(self, new_weights: bool = False) -> None:
        """Continue as before ``sleep``, with the same weights. With ``new_weights`` a refit follows, for which requests
        in flight wait."""
        ...


def pausable(engine: Engine[M], setting: str) -> PausableEngine[M]:
    """Return the engine if it can pause. Raises ``ConfigError`` naming the setting that needs it."""
    if isinstance(engine, PausableEngine):
        return engine
    raise ConfigError(
        f"{setting} needs an engine with the methods pause, resume, sleep and wake (PausableEngine in "
        f"whet/engines/base.py), and {type(engine).__name__} lacks some; leave the setting out, or write them"
    )


class HandedOut:
    """Hands out each token of a completion once, though several attempts may sample it one after another."""

    def __init__(self, sampled: Callable[[list[int]], None]) -> None:
        self._sampled, self._count = sampled, 0

    def from_the_first(self) -> Callable[[list[int]], None]:
        """Return a receiver of the tokens of one attempt from its first one on."""
        received = 0

        def receive(tokens: list[int]) -> None:
            nonlocal received
            new = tokens[max(self._count - received, 0) :]
            received += len(tokens)
            if new:
                self._count += len(new)
                self._sampled(new)

        return receive
