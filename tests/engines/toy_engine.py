"""A small engine: a transformers model in the run's process, one token at a time, without a KV cache.

A recipe names it by ``generator: {type: tests.engines.toy_engine:ToyConfig}``.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.base.lazy import torch_dtype
from whet.engines.base import Completion, SamplingParams, check_request, prompt_metrics
from whet.engines.config import Deployment, GeneratorConfig
from whet.engines.sampling import sample_tokens, uniform_stream
from whet.engines.torch.loading import Loading, build_engine_model, named_weights
from whet.metrics import Metrics
from whet.processes.compute import compute, compute_now


class ToyConfig(GeneratorConfig):
    """The settings, of which this engine adds none."""

    in_process: ClassVar[bool] = True

    def build_replica(self, model: Any, tokenizer: Any, deployment: Deployment) -> "ToyEngine":
        return compute_now(ToyEngine, self, model, tokenizer)


class ToyEngine:
    """See ``Engine``."""

    def __init__(self, config: ToyConfig, model: Any, tokenizer: Any) -> None:
        self.config, self.tokenizer, self.dtype = config, tokenizer, torch_dtype(config.dtype)
        self.model = build_engine_model(model, None, self.dtype).eval()
        self.version, self.complete, self.closed, self.metrics = 0, False, False, Metrics()
        self.lock = asyncio.Lock()  # a token or a refit; both wait in one queue

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        check_request(prompt, params, self.model.config.vocab_size, stops=self.tokenizer is not None)
        limit = max(0, min(params.max_new_tokens, self.config.max_context - len(prompt)))
        completion = Completion([], [], (self.version, self.version), "length")
        self.metrics.merge(prompt_metrics(len(prompt), cached=0))
        for number in uniform_stream(params.seed, limit):
            async with self.lock:
                if not self.complete:
                    raise RefitError("the toy engine has no complete set of weights; publish one first")
                if self.closed:
                    completion.finish_reason = "aborted"
                    break
                token, logprob = await compute(self.next_token, [*prompt, *completion.tokens], params, number)
                oldest = completion.versions[0] if completion.tokens else self.version
                completion.versions = (oldest, self.version)
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            text = self.tokenizer.decode(completion.tokens) if params.stop else ""
            if token in params.stop_token_ids or any(stop in text for stop in params.stop):
                completion.finish_reason = "stop"
                break
        return completion

    def next_token(self, tokens: list[int], params: SamplingParams, number: float) -> tuple[int, float]:
        rows = self.logits(tokens)[-1:].expand(16, -1)  # a whole block of rows, of which one is sampled
        chosen, logprobs = sample_tokens(rows, [number], [params.distribution], [params.greedy])
        return chosen[0], logprobs[0]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens], device=self.model.device)).logits[0].float()

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["OpenToy"]]:
        async with self.lock:  # requests in flight wait for it before their next token
            self.complete = False
            yield [model := OpenToy(self)]
            await compute(model.check_complete)
            self.version, self.complete = version, True

    def tally(self) -> Metrics:
        metrics, self.metrics = self.metrics, Metrics()
        return metrics

    async def close(self) -> None:
        self.closed = True


class OpenToy(Loading):
    """See ``OpenModel``. ``Loading`` copies the weights by name and checks that none is missing."""

    def __init__(self, engine: ToyEngine) -> None:
        super().__init__(engine.model)
        self.engine = engine

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return named_weights(self.engine.model)

    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        logprobs = self.engine.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
