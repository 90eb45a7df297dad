"""Weight sync from a learner to engines in other processes, bucket by bucket. Arrival is verified three times: by a
digest of every received tensor, computed by the receiver; by reading back the values that the engine's layers compute
with; and by a probe of its decode path.

    the learner's ranks                                            the ranks of every engine
    weights -> Sender -> Writer ====== buckets ======> Reader -> Receiver -> model
                 ^ next   | digests                                 ^ take    | digests, layers
                 +--------+------------- EngineSync ----------------+---------+

Who waits for whom: all engines are paused before the first bucket and sample again once digests and layers of all
agree. A bucket is written while the one before it is loaded. If the probe then differs, the run stops before anything
that was sampled is trained on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from whet.base.errors import ConfigError, DeadlineError, GeneratorError, RefitError, ReplicaLostError, WorkerError
from whet.base.seeds import derive_seed
from whet.cluster.lease import Devices
from whet.core.types import Distribution
from whet.engines.base import Completion, Engine, EngineRanks, SamplingParams, check_completion
from whet.engines.router import of_each
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.base import SEPARATE_DEVICES
from whet.weights.config import TransportName, WeightSyncConfig
from whet.weights.digest import differing
from whet.weights.manifest import to_text
from whet.weights.probe import compare_decoding
from whet.weights.receiver import Report
from whet.weights.sender import LocalSource
from whet.weights.source import Content, Handshake, NamedTensors, WeightRequest, WeightSource

log = logging.getLogger(__name__)
RECEIVER = "whet.weights.receiver:Receiver"
_PATIENCE = 5.0  # seconds in which one side may report its error after the other one failed
Adapter = tuple[int, float]
"""LoRA's rank and alpha: B A is scaled by alpha / rank."""


class EngineSync:
    """Publishes the weights of a learner to engines. The probe continues ``text``, under ``distribution``; the text
    must be long enough to fill a block of the engine's prefix cache, so that a cache that was not cleared is
    detected."""

    def __init__(
        self,
        config: WeightSyncConfig,
        text: list[int],
        distribution: Distribution | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.config, self.text, self.devices = config, text, devices or SEPARATE_DEVICES
        self.distribution = distribution or Distribution()
        self._engines: list[EngineRanks] = []  # of the last refit
        self._sender: WeightSource | None = None  # to which they are connected
        self._connection = 0  # number of this connection; the sender may since have connected to other engines
        self._transport: TransportName = "shared_memory"  # by which they are connected
        self._machines = set[str]()  # machines of the engines
        self._base: WeightSource | None = None  # whose frozen weights they have, for an adapter

    async def publish(self, learner: Learner, generator: Engine[EngineRanks], version: int) -> Metrics:
        """See ``WeightSync``. Reports ``refit/seconds`` (during which nothing was sampled), ``refit/gigabytes`` and
        ``refit/unread`` (tensors that could not be read back), and the probe's metrics."""
        async with self.devices.acquire("generation", new_weights=True):
            metrics, sampled = await self._refit_and_probe(learner, generator, version)
            for each in sampled:  # the learner scores a few tokens without waking its moments
                compared = await compare_decoding(
                    learner, self.text, each.tokens, each.logprobs, self.config, generator.dtype, self.distribution
                )
                metrics.merge(compared)
        return metrics

    async def _refit_and_probe(
        self, learner: Learner, generator: Engine[EngineRanks], version: int
    ) -> tuple[Metrics, Sequence[Completion]]:
        """Publish, and sample the probe with each engine. If one is lost in between, repeat with the others."""
        failures = 0
        while True:
            engines, metrics = await self._refit(learner, generator, version, self._adapter(learner))
            if not self.config.probe:
                return metrics, []
            try:
                return metrics, await of_each(engines, lambda engine, _: self._sample(engine, version))
            except (GeneratorError, DeadlineError) as error:
                failures += 1
                if failures >= len(engines):
                    raise
                log.warning("weights are published again: %s", error)

    async def load(self, weights: NamedTensors, generator: Engine[EngineRanks], version: int) -> Metrics:
        """See ``WeightSync``."""
        source = LocalSource(weights)
        try:
            return (await self._refit(source, generator, version))[1]
        finally:
            source.close()

    def _adapter(self, learner: Learner) -> Adapter | None:
        """Return rank and alpha of LoRA that is sent alone; None if merged weights are sent."""
        if self.config.lora == "merged":
            return None
        lora = learner.facts.model.lora
        if lora is None:
            raise ConfigError("weights.lora=adapter sends LoRA's tensors, but model.lora is not set")
        return lora.rank, lora.scaled_alpha

    async def _refit(
        self, source: WeightSource, generator: Engine[EngineRanks], version: int, adapter: Adapter | None = None
    ) -> tuple[Sequence[EngineRanks], Metrics]:
        """Send all weights, or an ``adapter``, preceded by the frozen weights if engines may not have them. If a
        replica is lost, repeat with the other replicas."""
        while True:
            try:
                return await self._send_all(source, generator, version, adapter)
            except ReplicaLostError as error:
                log.warning("weights are published again: %s", error)

    async def _send_all(
        self, source: WeightSource, generator: Engine[EngineRanks], version: int, adapter: Adapter | None
    ) -> tuple[Sequence[EngineRanks], Metrics]:
        started = time.perf_counter()
        size, unverified = 0, set[str]()
        async with generator.refit(version, adapter is not None) as engines:
            if self._engines != list(engines):  # an engine was lost or restarted
                self._engines, self._sender, self._base = list(engines), None, None
            contents: list[Content] = ["merged"]
            if adapter is not None:
                contents = ["adapter"] if self._base is source else ["base", "adapter"]
            self._base = None  # until all weights have arrived
            try:
                for content in contents:
                    handshake = await self._shake_hands(source, engines, generator.dtype, content)
                    await self._begin(engines, handshake, version, adapter if content == "adapter" else None)
                    sent, more = await self._send(source, engines, handshake)
                    size, unverified = size + more, unverified | await self._finish(engines, sent)
                    await source.end_weights()
            except BaseException:
                self._sender = None  # the state of the transfer is unknown
                source.abandon_weights()
                raise
        self._base = source if adapter is not None else None
        metrics = Metrics().mean("refit/gigabytes", size / 1e9).mean("refit/unread", len(unverified))
        return engines, metrics.mean("refit/seconds", time.perf_counter() - started)

    async def _shake_hands(
        self, source: WeightSource, engines: Sequence[EngineRanks], dtype: torch.dtype, content: Content
    ) -> Handshake:
        """Send the request to the source. Memory that it can't share with all engines is replaced by a collective."""
        config, full = self.config, self._sender is not source
        if full:
            self._transport = config.transport or "shared_memory"
            self._machines = set(await _call_all(engines, "machine"))
        request = WeightRequest(
            dtype=dtype,
            bucket_bytes=config.bucket_bytes,
            digest=config.digest,
            content=content,
            transport=self._transport,
            connected=0 if full else self._connection,
            receivers=sum(engine.ranks for engine in engines),
            folder=config.folder,
            deadline=config.deadline,
            delta=config.delta,
        )
        handshake = await source.begin_weights(request)
        if self._transport == "shared_memory" and self._machines != {handshake.machine}:
            if config.transport is not None:
                raise ConfigError(
                    "weights.transport=shared_memory uses one machine's memory, but the learner is on "
                    "a different one than an engine; set weights.transport=collective, or leave it out"
                )
            self._transport = "collective"
            handshake = await source.begin_weights(replace(request, transport=self._transport))
        self._sender, self._connection = source, handshake.number
        return handshake

    async def _begin(
        self, engines: Sequence[EngineRanks], handshake: Handshake, version: int, adapter: Adapter | None
    ) -> None:
        columns = self.config.columns if self.config.digest else 0
        manifest = to_text(handshake.manifest) if handshake.manifest is not None else None
        seed = derive_seed("columns", version)
        answers: list[list[str]] = await _call_all(engines, "begin", columns, seed, manifest, adapter)
        refused = sorted({name for answer in answers for name in answer})
        if refused:
            raise ConfigError(
                f"model.lora.target_modules: the engine can't apply LoRA to {', '.join(refused[:5])}"
                f"{f' and {len(refused) - 5} more' if len(refused) > 5 else ''}. Adapt other modules, or send merged "
                "weights: weights.lora=merged"
            )

    async def _connect(self, engines: Sequence[EngineRanks], handshake: Handshake) -> None:
        if handshake.connection is not None:
            first = list(accumulate((engine.ranks for engine in engines), initial=1))
            transport, connection = self._transport, handshake.connection
            await of_each(
                engines, lambda engine, i: engine.call(RECEIVER, "connect", transport, connection, first[i - 1])
            )

    async def _send(
        self, source: WeightSource, engines: Sequence[EngineRanks], handshake: Handshake
    ) -> tuple[dict[str, int], int]:
        """Return (digests of the sent tensors, bytes)."""
        sent, size = dict[str, int](), 0
        engines_work: Awaitable[Any] = self._connect(engines, handshake)
        while True:
            bucket, _ = await _both(source.next_weights(), engines_work)
            if bucket is None:
                return sent, size
            sent |= bucket.digests
            size += bucket.bytes
            engines_work = _call_all(engines, "take", bucket.number)

    async def _finish(self, engines: Sequence[EngineRanks], sent: dict[str, int]) -> set[str]:
        """Check the final reports of all ranks; return the tensors that could not be verified."""

        async def of(engine: EngineRanks) -> set[str]:
            reports: list[Report] = await engine.call(RECEIVER, "finish")
            for rank, report in enumerate(reports) if self.config.digest else ():
                _check(sent, report, f"rank {rank} of the engine: " if len(reports) > 1 else "")
            return {name for report in reports for name in report["unverified"]}

        return set().union(*await of_each(engines, lambda engine, _: of(engine)))

    async def _sample(self, engine: EngineRanks, version: int) -> Completion:
        params = SamplingParams(self.config.probe_tokens, seed=0, distribution=self.distribution)
        sampled = await engine.sample(self.text, params, f"probe/{version}")
        completion = check_completion(sampled, self.text, params, engine)
        if completion.finish_reason == "aborted":
            raise GeneratorError("the engine was closed while it sampled the probe")
        if not completion.tokens:
            raise RefitError(
                f"after publishing, the engine {type(engine).__name__} sampled no token of the probe, so its log-probs "
                "can't be compared; it must return the token that ends a reply, too"
            )
        if completion.cached:
            raise RefitError(
                f"after publishing, the engine served {completion.cached} tokens of the probe's prompt from a cache "
                "that was filled under older weights: its prefix cache was not reset"
            )
        if (newest := completion.versions[1]) > version:
            raise RefitError(
                f"after version {version} was published, the engine {type(engine).__name__} says that version {newest} "
                "sampled the probe; it must return the version that refit was called with"
            )
        return completion


async def _call_all(engines: Sequence[EngineRanks], method: str, *args: object) -> list[Any]:
    """Call a method of the receiver in every rank of every engine; return all results."""
    answers = await of_each(engines, lambda engine, _: engine.call(RECEIVER, method, *args))
    return [answer for of_ranks in answers for answer in of_ranks]


async def _both(of_learner: Awaitable[object], of_engines: Awaitable[object]) -> tuple[Any, Any]:
    """Return both results. If one side of a refit dies, the other one fails too; raises the error that names the dead
    side."""
    tasks = [asyncio.ensure_future(of_learner), asyncio.ensure_future(of_engines)]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await asyncio.wait(waiting, timeout=_PATIENCE)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            errors.sort(key=lambda e: (not isinstance(e, GeneratorError | WorkerError), isinstance(e, DeadlineError)))
            raise errors[0] from errors[-1] if len(errors) > 1 else errors[0].__cause__
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()


def _check(sent: dict[str, int], report: Report, where: str) -> None:
    """Raise ``RefitError`` if a rank did not get the ``sent`` tensors, or computes with different values."""
    lost, missing, wrong = differing(sent, report["digests"]), report["missing"], report["wrong"]
    tensors = lost or missing or wrong
    first = ", ".join(tensors[:5])
    if lost:
        problem = (
            f"after publishing, the engine did not receive the learner's weights: {len(lost)} of {len(sent)} tensors "
            f"are missing or differ, the first {first}"
        )
    elif missing:
        problem = (
            f"after publishing, {len(missing)} parameters of the engine have no new weight, the first {first}: learner "
            "and engine do not have the same architecture"
        )
    elif wrong:
        problem = (
            "after publishing, the engine's layers compute with different weights than it received: "
            f"{len(wrong)} of {len(sent)} tensors differ, the first {first}"
        )
    else:
        return
    raise RefitError(f"{where}{problem}. The run stops: its rollouts would be off-policy", tensors)
