"""Weights go from a learner to a generator in the same process: one cast per tensor into the generator's own storage.
Then arrival is proven, by a digest of what the generator holds and by a probe of its decode path. Knows no algorithm.

Who waits for what: the generator is paused before it is written to and goes on only after the digest agrees."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from whet.errors import RefitError
from whet.generators.base import Generator
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.config import WeightSyncConfig
from whet.weights.digest import differing, digest
from whet.weights.probe import compare_decoding


class Refittable(Generator, Protocol):
    """A generator in this process whose weights can be written and read."""

    @property
    def dtype(self) -> torch.dtype: ...

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None: ...
    def named_weights(self) -> Iterable[tuple[str, Tensor]]: ...
    def score_decode(self, prompt: list[int], tokens: list[int]) -> list[float]: ...


class InProcessSync:
    """Publishes the weights of a learner to a generator in the same process. The last tokens of ``text`` are what the
    probe compares log-probs of; the rest is their prompt. At least two tokens."""

    def __init__(self, config: WeightSyncConfig, text: list[int]) -> None:
        count = min(config.probe_tokens, len(text) - 1)
        self.config = config
        self.prompt, self.tokens = text[:-count], text[-count:]

    async def publish(
        self, learner: Learner, generator: Refittable, version: int, weights: Iterable[tuple[str, Tensor]] | None = None
    ) -> Metrics:
        """See ``WeightSync``."""
        await generator.pause()
        weights = await learner.named_weights() if weights is None else weights
        await asyncio.to_thread(self._write, weights, generator)
        metrics = await self._probe(learner, generator) if self.config.probe else Metrics()
        await generator.resume(version)
        return metrics

    async def load(self, weights: Iterable[tuple[str, Tensor]], generator: Refittable, version: int) -> Metrics:
        """See ``WeightSync``."""
        await generator.pause()
        await asyncio.to_thread(self._write, weights, generator)
        await generator.resume(version)
        return Metrics()

    def _write(self, weights: Iterable[tuple[str, Tensor]], generator: Refittable) -> None:
        cast = [(name, tensor.to(generator.dtype)) for name, tensor in weights]
        generator.load_weights(cast)
        if self.config.digest:
            held = digest(generator.named_weights())
            wrong = differing(digest((name, tensor) for name, tensor in cast if name in held), held)
            if wrong:
                raise RefitError(
                    f"after publishing, the generator does not hold the learner's weights: {len(wrong)} of {len(held)} "
                    f"tensors differ, the first {', '.join(wrong[:5])}. The run stops: its rollouts would be off-policy"
                )

    async def _probe(self, learner: Learner, generator: Refittable) -> Metrics:
        decoded = await asyncio.to_thread(generator.score_decode, self.prompt, self.tokens)
        return await compare_decoding(learner, self.prompt, self.tokens, decoded, self.config, dtype=generator.dtype)
