"""Weight sync from a learner to generators in the same process: one cast per tensor, a bucket at a time, into the
generator's storage. Then arrival is verified: the generator's tensors are compared with the learner's bit for bit, or
by digests if the learner is in another process, and a probe runs through the generator's decode path.

Who waits for whom: the generators are paused before they are written to and continue only after both checks.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence, Sized
from contextlib import aclosing

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.cluster.lease import Devices
from whet.engines.base import Engine, OpenModel
from whet.engines.router import of_each
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.processes.compute import compute
from whet.weights.base import SEPARATE_DEVICES
from whet.weights.config import RefitConfig
from whet.weights.digest import differing, digest, same_bits
from whet.weights.probe import compare_decoding
from whet.weights.sender import LocalSource
from whet.weights.source import Bucket, NamedTensors, WeightRequest, WeightSource

_PROMPT = 8  # tokens of the probe's prompt: with eight compared tokens, products have the minimum number of rows


class InProcessSync:
    """Publishes the weights of a learner to a generator in the same process. The probe compares log-probs of the last
    tokens of ``text``, which must have at least two; some tokens before them are their prompt."""

    def __init__(self, config: RefitConfig, text: list[int], devices: Devices | None = None) -> None:
        count = min(config.probe_tokens, len(text) - 1)
        self.config, self.devices = config, devices or SEPARATE_DEVICES
        self.prompt, self.tokens = text[-count - _PROMPT : -count], text[-count:]

    async def publish(self, learner: Learner, generator: Engine[OpenModel], version: int) -> Metrics:
        """See ``WeightSync``."""
        metrics = Metrics()
        # Includes the learner's part of the probe, because nothing is sampled meanwhile.
        async with self.devices.acquire("generation", new_weights=True), generator.refit(version) as models:
            await self._write(learner, models, generator.dtype)
            for model in models if self.config.probe else ():
                decoded = await compute(model.score_decode, self.prompt, self.tokens)
                compared = await compare_decoding(
                    learner, self.prompt, self.tokens, decoded, self.config, generator.dtype
                )
                metrics.merge(compared)
        return metrics

    async def load(self, weights: NamedTensors, generator: Engine[OpenModel], version: int) -> Metrics:
        """See ``WeightSync``."""
        async with generator.refit(version) as models:
            await self._write(LocalSource(weights), models, generator.dtype)
        return Metrics()

    async def _write(self, source: WeightSource, models: Sequence[OpenModel], dtype: torch.dtype) -> None:
        sent: dict[str, int] = {}
        request = WeightRequest(dtype, self.config.bucket_bytes, self.config.digest)
        async with aclosing(self._buckets(source, request)) as buckets:
            async for bucket in buckets:
                sent |= bucket.digests
                for model in models:
                    await compute(model.load, bucket.tensors)
        await of_each(models, lambda model, _: compute(model.check_complete))
        if not self.config.digest:
            return
        if sent:
            await of_each(models, lambda model, _: compute(_check_digest, model, sent))
        else:
            await self._compare(source, models, dtype)

    async def _compare(self, source: WeightSource, models: Sequence[OpenModel], dtype: torch.dtype) -> None:
        """Compare all of the source's tensors with the generators', after all were written."""
        stored = [dict(model.named_weights()) for model in models]
        wrong: list[list[str]] = [[] for _ in models]
        seen: set[str] = set()
        request = WeightRequest(dtype, self.config.bucket_bytes, digest=False)
        async with aclosing(self._buckets(source, request)) as buckets:
            async for bucket in buckets:
                for tensors, names in zip(stored, wrong, strict=True):
                    names += await compute(_other_bits, bucket.tensors, tensors)
                seen.update(name for name, _ in bucket.tensors)

        async def refuse(model: OpenModel, number: int) -> None:
            tensors = stored[number - 1]
            _refuse([*wrong[number - 1], *(name for name in tensors if name not in seen)], tensors)

        await of_each(models, refuse)

    @staticmethod
    async def _buckets(source: WeightSource, request: WeightRequest) -> AsyncGenerator[Bucket]:
        try:
            await source.begin_weights(request)
            while (bucket := await source.next_weights()) is not None:
                yield bucket
                bucket.tensors.clear()  # frees it before the next one is made
            await source.end_weights()
        except BaseException:
            source.abandon_weights()
            raise


def _check_digest(model: OpenModel, sent: Mapping[str, int]) -> None:
    digests = digest(model.named_weights())
    _refuse(differing({name: number for name, number in sent.items() if name in digests}, digests), digests)


def _other_bits(tensors: Iterable[tuple[str, Tensor]], stored: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors if name in stored and not same_bits(stored[name], tensor)]


def _refuse(wrong: list[str], tensors: Sized) -> None:
    """Raise ``RefitError`` if a tensor differs."""
    if wrong:
        raise RefitError(
            f"after publishing, the generator's weights differ from the learner's: {len(wrong)} of {len(tensors)} "
            f"tensors differ, the first {', '.join(wrong[:5])}. The run stops: its rollouts would be off-policy",
            wrong,
        )
