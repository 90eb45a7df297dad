"""Continuous batching: requests wait in a queue, take free rows, and advance by one token per step, or by several if
they were guessed. Used by a single thread, without asyncio, pauses or deadlines."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from whet.core.expert_ids import Ids, unknown
from whet.engines.base import Completion, SamplingParams
from whet.engines.sampling import likeliest_tokens, sample_tokens, uniform_stream
from whet.engines.torch.engine_model import EngineModel
from whet.engines.torch.guesses import Guesser
from whet.engines.torch.prefix import Prefix
from whet.engines.torch.prefix_cache import CachedPrefix, PrefixCache, common_prefix
from whet.engines.torch.tiles import BLOCK, ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, eq=False)
class Request:
    """One completion: its request and the tokens sampled so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int  # maximum number of tokens: its own limit or the room in the context
    uniforms: np.ndarray = field(init=False)  # [limit] one draw per token
    text: np.ndarray = field(init=False)  # [prompt + limit] tokens of the prompt and those sampled so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)  # if the parameters ask for them
    versions: tuple[int, int] | None = None
    finish: Literal["stop", "length", "aborted"] | None = None
    cached: int = 0  # prompt tokens that were not computed for it
    experts: list[Ids] = field(default_factory=list)  # of the prompt's tokens and of fed tokens, if recorded
    cancelled: bool = False  # set by another thread; the row is dropped before the next step
    sampled: Callable[[list[int]], None] | None = None  # gets the new tokens of each step, for a stream
    handed_out: int = 0  # tokens that it got

    def __post_init__(self) -> None:
        self.uniforms = uniform_stream(self.params.seed, max(self.limit, 0))
        self.text = np.zeros(len(self.prompt) + max(self.limit, 0), np.int64)
        self.text[: len(self.prompt)] = self.prompt

    def take(self, token: int, logprob: float, version: int, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        """Append a sampled token and check whether it ends the completion."""
        self.text[len(self.prompt) + len(self.tokens)] = token
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions = (version if self.versions is None else self.versions[0], version)
        if token in self.params.stop_token_ids or (self.params.stop and self._completes_stop(tokenizer)):
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"

    def _completes_stop(self, tokenizer: "PreTrainedTokenizerBase | None") -> bool:
        """Return whether the newest token completes a stop string. A character takes at most 4 tokens (one per byte),
        so the tail contains any stop string that just ended."""
        assert tokenizer is not None
        tail = self.tokens[-4 * max(len(stop) for stop in self.params.stop) - 4 :]
        text = tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self.params.stop)

    def completion(self, version: int) -> Completion:
        """Return the result; ``version`` is used if no token was sampled."""
        versions = self.versions or (version, version)
        result = Completion(self.tokens, self.logprobs, versions, self.finish or "aborted", self.cached, self.likeliest)
        if self.experts:
            last = len(self.prompt) + len(self.tokens) - sum(map(len, self.experts))
            result.experts = np.concatenate([*self.experts, unknown(last, self.experts[0].shape[1:])])
        return result


@dataclass(slots=True)
class Counters:
    """Totals since the start; times are seconds of the engine's thread."""

    prompt_tokens: int = 0  # of all requests
    prefill_tokens: int = 0  # prompt tokens that were computed
    decode_steps: int = 0
    sampled_tokens: int = 0
    guessed_tokens: int = 0
    kept_guesses: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # forward passes of the model
    sampling_seconds: float = 0.0

    def copy(self) -> "Counters":
        return replace(self)

    def since(self, before: "Counters") -> "Counters":
        """Return the difference to ``before``, an earlier copy."""
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class Decoder:
    """The rows in flight and the queue. ``step`` admits requests for free rows and advances every row by one token."""

    def __init__(
        self,
        engine: EngineModel,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_batch: int,
        prefill_tokens: int,
        prefix_tokens: int | None,
        guesser: Guesser | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self.guesser = guesser
        self.queue: deque[Request] = deque()
        self.rows: list[Request] = []  # row i of the cache is rows[i]
        self.cache, self.feed = engine.open_rows(max_batch)
        self.prefix_cache = PrefixCache(prefix_tokens)  # for the current weights
        self.version = 0
        self.counters = Counters()

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.rows)

    def forget_prefixes(self) -> None:
        """Clear the prefix cache because the weights changed. Rows in flight keep their KV cache."""
        self.prefix_cache.clear()

    def readmit(self) -> None:
        """Put the rows in flight at the front of the queue: their tokens so far will be computed again, as a prompt."""
        for row in reversed(range(len(self.rows))):
            self.cache.leave(row)
            self.queue.appendleft(self.rows.pop())

    def step(self) -> list[Request]:
        """Advance every row, and return the requests that ended in this step."""
        ended = self._drop(lambda request: request.cancelled)
        ended += self._admit()
        if self.rows:
            started = perf_counter()
            guesses = self._guesses()
            fed = [[request.tokens[-1], *guess] for request, guess in zip(self.rows, guesses, strict=True)]
            logits = self.feed(fed)
            sampled = perf_counter()
            counts = self._sample(self.rows, logits, guesses)
            self.cache.commit(counts)
            if self.engine.experts is not None:
                starts = accumulate(map(len, fed), initial=0)
                for request, start, count in zip(self.rows, starts, counts, strict=False):
                    request.experts.append(self.engine.experts[start : start + count])
            self.counters.decode_steps += 1
            self.counters.decode_seconds += sampled - started
            self.counters.sampling_seconds += perf_counter() - sampled
            ended += self._drop(lambda request: request.finish is not None)
        return ended

    def _guesses(self) -> list[list[int]]:
        """Return guesses of the tokens after the next one of each row, none beyond its limit."""
        if self.guesser is None:
            return [[]] * len(self.rows)
        texts = [request.text[: len(request.prompt) + len(request.tokens)] for request in self.rows]
        return self.guesser.guess(texts, [request.limit - len(request.tokens) - 1 for request in self.rows])

    def _drop(self, done: Callable[[Request], bool]) -> list[Request]:
        dropped = []
        for row in reversed(range(len(self.rows))):
            if done(self.rows[row]):
                dropped.append(self.rows[row])
                self.cache.leave(row)  # the last row takes its number
                self.rows[row] = self.rows[-1]
                self.rows.pop()
        return dropped

    def _admit(self) -> list[Request]:
        """Fill the free rows from the queue; each new request gets its first token. Return the requests that end with
        it."""
        taken: list[Request] = []
        ended: list[Request] = []
        while self.queue and len(self.rows) + len(taken) < self.max_batch:
            request = self.queue.popleft()
            if request.cancelled:
                ended.append(request)
            else:
                taken.append(request)
        if not taken:
            return ended
        started = perf_counter()
        cached = self._prompts(taken)
        sampled = perf_counter()
        for request, entry in zip(taken, cached, strict=True):
            if entry.prefix.experts is not None:  # tokens that were fed before keep their experts
                request.experts.append(entry.prefix.experts[sum(map(len, request.experts)) :])
        logits = [entry.logits for entry in cached]
        self._sample(taken, torch.stack(logits + logits[-1:] * (-len(logits) % ROWS)))
        self.counters.prefill_seconds += sampled - started
        self.counters.sampling_seconds += perf_counter() - sampled
        staying = [
            (request, entry.prefix) for request, entry in zip(taken, cached, strict=True) if request.finish is None
        ]
        self.cache.join(prefix for _, prefix in staying)
        self.rows += [request for request, _ in staying]
        return ended + [request for request in taken if request.finish is not None]

    def _prompts(self, requests: Sequence[Request]) -> list[CachedPrefix]:
        """Return the cache entries of the requests' prompts, computing the missing ones."""
        prompts = [request.prompt + tuple(request.tokens) for request in requests]
        images = {prompt: request.params.images for prompt, request in zip(prompts, requests, strict=True)}
        entries = {prompt: self.prefix_cache.get(prompt) for prompt in prompts}
        computed: dict[tuple[int, ...], int] = {}
        missing = sorted(prompt for prompt, entry in entries.items() if entry is None)
        while missing:
            pack, missing = self._pack(missing)
            results = self.engine.prefill(list(pack), list(pack.values()), [images[prompt] for prompt in pack])
            for (prompt, beginning), (prefix, logits) in zip(pack.items(), results, strict=True):
                entries[prompt] = self.prefix_cache.add(prompt, CachedPrefix(prefix, logits))
                computed[prompt] = len(prompt) - beginning.length
        self.prefix_cache.trim()
        self.counters.prompt_tokens += sum(map(len, prompts))
        self.counters.prefill_tokens += sum(computed.values())
        for request, prompt in zip(requests, prompts, strict=True):
            new = computed.pop(prompt, 0)  # the first request computes it for all
            request.cached = request.cached if request.tokens else len(prompt) - new
        return [entry for prompt in prompts if (entry := entries[prompt]) is not None]

    def _pack(self, missing: list[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], Prefix], list[tuple[int, ...]]]:
        """Choose the prompts of one forward pass of bounded size; ``missing`` is sorted, so prompts with a common
        prefix are adjacent. Return (the prompts with their cached prefixes; the prompts left for later)."""
        pack: dict[tuple[int, ...], Prefix] = {}
        later: list[tuple[int, ...]] = []
        before: tuple[int, ...] = ()
        size = 0
        for prompt in missing:
            cached = self.prefix_cache.longest(prompt)
            new = len(prompt) - cached.length
            waits = common_prefix(before, prompt) >= cached.length + BLOCK  # the prompt before it will be cached
            if pack and (waits or size + new > self.prefill_tokens):
                later.append(prompt)
            else:
                pack[prompt] = cached
                size += new
            before = prompt
        return pack, later

    def _sample(
        self, requests: Sequence[Request], logits: Tensor, guesses: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Sample the next token of each request and, while the tokens are the guessed ones, the ones after it.
        Return how many each got. ``logits``: for each request the ones after its newest token and after each guess."""
        guesses = guesses or [[]] * len(requests)
        places = [(request, i) for request, guess in zip(requests, guesses, strict=True) for i in range(len(guess) + 1)]
        tokens, logprobs = sample_tokens(
            logits,
            [float(request.uniforms[len(request.tokens) + i]) for request, i in places],
            [request.params.distribution for request, _ in places],
            [request.params.greedy for request, _ in places],
        )
        counts = []
        first = 0
        for request, guess in zip(requests, guesses, strict=True):
            for row, guessed in enumerate([*guess, None], first):
                if not isfinite(logprobs[row]):
                    raise FloatingPointError("the model's logits are not finite; the weights are damaged")
                params = request.params
                if params.likeliest or params.among:
                    request.likeliest.append(likeliest_tokens(logits[row], params.likeliest, params.among))
                request.take(tokens[row], logprobs[row], self.version, self.tokenizer)
                if tokens[row] != guessed or request.finish is not None:
                    break
            counts.append(row + 1 - first)
            first += len(guess) + 1
        self.counters.sampled_tokens += sum(counts)
        if self.guesser is not None and len(places) > len(requests):
            self.guesser.verified(guesses, [count - 1 for count in counts])
            self.counters.guessed_tokens += len(places) - len(requests)
            self.counters.kept_guesses += sum(counts) - len(requests)
        return counts
