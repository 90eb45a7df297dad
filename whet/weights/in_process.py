"""Weights go from a learner to generators in the same process: one cast per tensor, a bucket at a time, into the
generator's own storage. Then arrival is proven, by a digest of what the generator holds and by a probe of its decode
path. Knows no algorithm.

Who waits for what: the generators are paused before they are written to and go on only after digest and probe agree."""

from collections.abc import Sequence

import torch

from whet.cluster.lease import Devices
from whet.errors import RefitError
from whet.generators.base import OpenModel, Refittable
from whet.generators.router import of_each
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.processes.compute import compute
from whet.weights.base import OWN_DEVICES
from whet.weights.config import RefitConfig
from whet.weights.digest import differing, digest
from whet.weights.local import LocalSource
from whet.weights.probe import compare_decoding
from whet.weights.source import NamedTensors, WeightRequest, WeightSource


class InProcessSync:
    """Publishes the weights of a learner to a generator in the same process. The last tokens of ``text`` are what the
    probe compares log-probs of; the rest is their prompt. At least two tokens."""

    def __init__(self, config: RefitConfig, text: list[int], devices: Devices | None = None) -> None:
        count = min(config.probe_tokens, len(text) - 1)
        self.config, self.devices = config, devices or OWN_DEVICES
        self.prompt, self.tokens = text[:-count], text[-count:]

    async def publish(self, learner: Learner, generator: Refittable[OpenModel], version: int) -> Metrics:
        """See ``WeightSync``."""
        metrics = Metrics()
        # The learner's part of the probe is in it, too: nobody samples meanwhile.
        async with self.devices.lent_to("generation", new_weights=True), generator.refit(version) as models:
            await self._write(learner, models, generator.dtype)
            for model in models if self.config.probe else ():
                decoded = await compute(model.score_decode, self.prompt, self.tokens)
                text, dtype = (self.prompt, self.tokens), generator.dtype
                metrics.merge(await compare_decoding(learner, *text, decoded, self.config, dtype))
        return metrics

    async def load(self, weights: NamedTensors, generator: Refittable[OpenModel], version: int) -> Metrics:
        """See ``WeightSync``."""
        async with generator.refit(version) as models:
            await self._write(LocalSource(weights), models, generator.dtype)
        return Metrics()

    async def _write(self, source: WeightSource, models: Sequence[OpenModel], dtype: torch.dtype) -> None:
        sent: dict[str, int] = {}
        await source.begin_weights(WeightRequest(dtype, self.config.bucket_bytes, self.config.digest))
        while (bucket := await source.next_weights()) is not None:
            sent |= bucket.digests
            for model in models:
                await compute(model.load, bucket.tensors)
            bucket.tensors.clear()  # before the next one is made
        await source.end_weights()
        await of_each(models, lambda model, _: compute(self._check, model, sent))

    def _check(self, model: OpenModel, sent: dict[str, int]) -> None:
        model.check_complete()
        held = digest(model.named_weights()) if self.config.digest else {}
        wrong = differing({name: number for name, number in sent.items() if name in held}, held)
        if wrong:
            raise RefitError(
                f"after publishing, the generator does not hold the learner's weights: {len(wrong)} of {len(held)} "
                f"tensors differ, the first {', '.join(wrong[:5])}. The run stops: its rollouts would be off-policy",
                wrong,
            )
