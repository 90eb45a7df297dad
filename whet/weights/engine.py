"""Weights go from a learner to an engine in other processes, bucket by bucket, and their arrival is proven three times:
by a digest of every tensor that came, computed there; by reading back what the engine's layers compute with; and by a
probe of its decode path. Knows no engine by name and no algorithm.

Who waits for what: the engine is paused before the first bucket and samples again once digests and layers agree. A
bucket is written while the one before it is loaded. If the probe then disagrees, the run stops before anything that was
sampled is learned from.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.errors import RefitError
from whet.generators.base import Generator, SamplingParams
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.seeds import derive_seed
from whet.types import Distribution
from whet.weights.base import in_buckets
from whet.weights.config import WeightSyncConfig
from whet.weights.digest import differing, digest
from whet.weights.disk import Disk
from whet.weights.probe import compare_decoding
from whet.weights.shared_memory import SharedMemory

RECEIVER = "whet.weights.receiver:Receiver"


class Engine(Generator, Protocol):
    """A generator whose model lives in other processes."""

    weights_complete: bool

    @property
    def dtype(self) -> torch.dtype: ...

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        """Call ``method`` of the object that ``module:Class`` makes of the model, in each process that holds it."""
        ...


class Transport(Protocol):
    """What carries a bucket from here to there."""

    method: str  # of the receiver

    def write(self, bucket: int, named: list[tuple[str, Tensor]]) -> tuple[Any, ...]: ...
    def sent(self) -> None: ...


class EngineSync:
    """Publishes the weights of a learner to one engine. ``text`` is what the probe continues, under ``distribution``:
    long enough to fill a block of the engine's prefix cache, so that a kept cache shows."""

    def __init__(
        self,
        config: WeightSyncConfig,
        text: list[int],
        distribution: Distribution | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config, self.text = config, text
        self.distribution = distribution or Distribution()
        self.transport: Transport = Disk(folder) if config.transport == "disk" else SharedMemory()

    async def publish(
        self, learner: Learner, generator: Engine, version: int, weights: Iterable[tuple[str, Tensor]] | None = None
    ) -> Metrics:
        """See ``WeightSync``. Reports ``refit/seconds`` (how long nothing was sampled), ``refit/gigabytes`` and
        ``refit/unread`` (tensors that could not be read back), and the probe's metrics."""
        weights = await learner.named_weights() if weights is None else weights
        metrics = await self.load(weights, generator, version)
        return metrics.merge(await self._probe(learner, generator, version)) if self.config.probe else metrics

    async def load(self, weights: Iterable[tuple[str, Tensor]], generator: Engine, version: int) -> Metrics:
        """See ``WeightSync``."""
        started = time.perf_counter()
        await generator.pause()
        generator.weights_complete = False
        metrics = await self._send(weights, generator, version)
        generator.weights_complete = True
        await generator.resume(version)
        return metrics.mean("refit/seconds", time.perf_counter() - started)

    async def _send(self, weights: Iterable[tuple[str, Tensor]], generator: Engine, version: int) -> Metrics:
        columns = self.config.columns if self.config.digest else 0
        await generator.call(RECEIVER, "begin", columns, derive_seed("columns", version))
        buckets = in_buckets(weights, int(self.config.bucket_mb * 2**20))
        sent: dict[str, int] = {}
        size, count = 0, 0
        taking: asyncio.Task[list[Any]] | None = None
        try:
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                arguments, digests, written = await asyncio.to_thread(self._write, count, bucket, generator.dtype)
                sent |= digests
                size, count = size + written, count + 1
                if taking is not None:
                    await taking
                taking = asyncio.ensure_future(generator.call(RECEIVER, self.transport.method, *arguments))
            if taking is not None:
                await taking
        finally:
            if taking is not None:
                taking.cancel()
            self.transport.sent()
        unread: set[str] = set()
        reports = await generator.call(RECEIVER, "finish")
        for rank, report in enumerate(reports):
            self._check(sent, report, f"rank {rank} of the engine" if len(reports) > 1 else "the engine")
            unread |= set(report["unread"])
        return Metrics().mean("refit/gigabytes", size / 1e9).mean("refit/unread", len(unread))

    def _write(
        self, number: int, bucket: list[tuple[str, Tensor]], dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, int], int]:
        """(what the receiver is told, digests, bytes). Digests are of the tensors, not of what was written."""
        cast = [(name, tensor.detach().to(dtype)) for name, tensor in bucket]
        digests = digest(cast) if self.config.digest else {}
        return self.transport.write(number, cast), digests, sum(tensor.nbytes for _, tensor in cast)

    def _check(self, sent: dict[str, int], report: dict[str, Any], engine: str) -> None:
        if not self.config.digest:
            return
        wrong = differing(sent, report["digests"])
        if wrong:
            raise RefitError(
                f"after publishing, {engine} did not receive the learner's weights: {len(wrong)} of {len(sent)} "
                f"tensors are missing or differ, the first {', '.join(wrong[:5])}. The run stops: its rollouts would "
                "be off-policy"
            )
        if report["missing"]:
            raise RefitError(
                f"after publishing, {len(report['missing'])} parameters of {engine} have no new weight, the first "
                f"{', '.join(report['missing'][:5])}: learner and engine do not have the same architecture"
            )
        if report["wrong"]:
            raise RefitError(
                f"after publishing, the layers of {engine} compute with other weights than it received: "
                f"{len(report['wrong'])} of {len(sent)} tensors differ, the first {', '.join(report['wrong'][:5])}. "
                "The run stops: its rollouts would be off-policy"
            )

    async def _probe(self, learner: Learner, generator: Engine, version: int) -> Metrics:
        params = SamplingParams(self.config.probe_tokens, seed=0, distribution=self.distribution)
        completion = await generator.sample(self.text, params, f"probe/{version}")
        if completion.cached:
            raise RefitError(
                f"after publishing, the engine served {completion.cached} tokens of the probe's prompt from a cache "
                "that was filled under older weights: its prefix cache was not reset"
            )
        return await compare_decoding(
            learner,
            self.text,
            completion.tokens,
            completion.logprobs,
            self.config,
            dtype=generator.dtype,
            distribution=self.distribution,
        )
