"""Weights go from a learner to generators in the same process: one cast per tensor, a bucket at a time, into the
generator's own storage. Then arrival is proven, by a digest of what the generator holds and by a probe of its decode
path. Knows no algorithm.

Who waits for what: the generators are paused before they are written to and go on only after digest and probe agree."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.cluster.lease import Devices
from whet.errors import RefitError
from whet.generators.base import Generator
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.processes.compute import compute
from whet.weights.base import NOBODY_SHARES, of_each, replicas
from whet.weights.config import WeightSyncConfig
from whet.weights.digest import differing, digest
from whet.weights.local import LocalSource
from whet.weights.parcel import Named, Sending, WeightSource
from whet.weights.probe import compare_decoding


class Refittable(Generator, Protocol):
    """A generator in this process whose weights can be written and read."""

    @property
    def dtype(self) -> torch.dtype: ...

    def begin_weights(self) -> None: ...
    def take_weights(self, named: Iterable[tuple[str, Tensor]]) -> None: ...
    def finish_weights(self) -> None: ...
    def named_weights(self) -> Iterable[tuple[str, Tensor]]: ...
    def score_decode(self, prompt: list[int], tokens: list[int]) -> list[float]: ...


class InProcessSync:
    """Publishes the weights of a learner to a generator in the same process, or to those behind a router. The last
    tokens of ``text`` are what the probe compares log-probs of; the rest is their prompt. At least two tokens."""

    def __init__(self, config: WeightSyncConfig, text: list[int], devices: Devices | None = None) -> None:
        count = min(config.probe_tokens, len(text) - 1)
        self.config, self.devices = config, devices or NOBODY_SHARES
        self.prompt, self.tokens = text[:-count], text[-count:]

    async def publish(self, learner: Learner, generator: Any, version: int) -> Metrics:
        """See ``WeightSync``."""
        async with self.devices.lent_to("generation"):  # the learner's part of the probe too: nobody samples meanwhile
            await generator.pause()
            await self._write(learner, replicas(generator))
            metrics = Metrics()
            if self.config.probe:
                for one in replicas(generator):
                    metrics.merge(await self._probe(learner, one))
            await generator.resume(version)
        return metrics

    async def load(self, weights: Named, generator: Any, version: int) -> Metrics:
        """See ``WeightSync``."""
        await generator.pause()
        await self._write(LocalSource(weights), replicas(generator))
        await generator.resume(version)
        return Metrics()

    async def _write(self, source: WeightSource, generators: Sequence[Refittable]) -> None:
        size = int(self.config.bucket_mb * 2**20)
        await source.begin_weights(Sending(generators[0].dtype, size, self.config.digest))
        for generator in generators:
            generator.begin_weights()
        sent: dict[str, int] = {}
        while (parcel := await source.next_weights()) is not None:
            sent |= parcel.digests
            for generator in generators:
                await compute(generator.take_weights, parcel.tensors)
            del parcel  # before the next one is made
        await source.end_weights()
        await of_each(generators, lambda one, _: compute(self._finish, one, sent))

    def _finish(self, generator: Refittable, sent: dict[str, int]) -> None:
        generator.finish_weights()
        if self.config.digest:
            held = digest(generator.named_weights())
            wrong = differing({name: number for name, number in sent.items() if name in held}, held)
            if wrong:
                raise RefitError(
                    f"after publishing, the generator does not hold the learner's weights: {len(wrong)} of {len(held)} "
                    f"tensors differ, the first {', '.join(wrong[:5])}. The run stops: its rollouts would be off-policy"
                )

    async def _probe(self, learner: Learner, generator: Refittable) -> Metrics:
        decoded = await compute(generator.score_decode, self.prompt, self.tokens)
        return await compare_decoding(learner, self.prompt, self.tokens, decoded, self.config, dtype=generator.dtype)
