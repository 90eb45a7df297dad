"""Weights go from a learner to engines in other processes, bucket by bucket, and their arrival is proven three times:
by a digest of every tensor that came, computed there; by reading back what the engine's layers compute with; and by a
probe of its decode path. Knows no engine by name and no algorithm.

    the learner's ranks                                            the ranks of every engine
    weights -> Sender -> Writer ====== buckets ======> Reader -> Receiver -> model
                 ^ next   | digests                                 ^ take    | digests, layers
                 +--------+------------- EngineSync ----------------+---------+

Who waits for what: all engines are paused before the first bucket and sample again once digests and layers of all
agree. A bucket is written while the one before it is loaded. If the probe then disagrees, the run stops before anything
that was sampled is learned from.
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
from whet.engines.base import Completion, Engine, Refittable, SamplingParams
from whet.engines.router import of_each
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.base import OWN_DEVICES
from whet.weights.config import TransportName, WeightSyncConfig
from whet.weights.digest import differing
from whet.weights.local import LocalSource
from whet.weights.manifest import to_text
from whet.weights.probe import compare_decoding
from whet.weights.receiver import Report
from whet.weights.source import Content, Handshake, NamedTensors, WeightRequest, WeightSource

log = logging.getLogger(__name__)
RECEIVER = "whet.weights.receiver:Receiver"
_PATIENCE = 5.0  # seconds that one side has to say why, when the other could not go on
Adapter = tuple[int, float]
"""LoRA's rank and alpha: B A counts alpha / rank times."""


class EngineSync:
    """Publishes the weights of a learner to engines. ``text`` is what the probe continues, under ``distribution``: long
    enough to fill a block of the engine's prefix cache, so that a kept cache shows."""

    def __init__(
        self,
        config: WeightSyncConfig,
        text: list[int],
        distribution: Distribution | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.config, self.text, self.devices = config, text, devices or OWN_DEVICES
        self.distribution = distribution or Distribution()
        self._engines: list[Engine] = []  # of the last refit
        self._sender: WeightSource | None = None  # to whom they are connected
        self._transport: TransportName = "shared_memory"  # by which they are
        self._machines = set[str]()  # that they are on
        self._base: WeightSource | None = None  # whose frozen weights they hold, which an adapter needs

    async def publish(self, learner: Learner, generator: Refittable[Engine], version: int) -> Metrics:
        """See ``WeightSync``. Reports ``refit/seconds`` (how long nothing was sampled), ``refit/gigabytes`` and
        ``refit/unread`` (tensors that could not be read back), and the probe's metrics."""
        async with self.devices.lent_to("generation", new_weights=True):
            engines, metrics = await self._refit(learner, generator, version, self._adapter(learner))
            if not self.config.probe:
                return metrics
            sampled = await of_each(engines, lambda engine, _: self._sample(engine, version))
            for completion in sampled:  # the learner scores beside the engines: a few tokens, without its moments
                text, decoded = (self.text, completion.tokens), completion.logprobs
                config, dtype = self.config, generator.dtype
                metrics.merge(await compare_decoding(learner, *text, decoded, config, dtype, self.distribution))
        return metrics

    async def load(self, weights: NamedTensors, generator: Refittable[Engine], version: int) -> Metrics:
        """See ``WeightSync``."""
        source = LocalSource(weights)
        try:
            return (await self._refit(source, generator, version))[1]
        finally:
            source.close()

    def _adapter(self, learner: Learner) -> Adapter | None:
        """Return rank and alpha of LoRA that travels alone; None where merged weights do."""
        if self.config.lora == "merged":
            return None
        lora = learner.facts.model.lora
        if lora is None:
            raise ConfigError("weights.lora=adapter sends what LoRA trains, and model.lora is not set")
        return lora.rank, lora.alpha

    async def _refit(
        self, source: WeightSource, generator: Refittable[Engine], version: int, adapter: Adapter | None = None
    ) -> tuple[Sequence[Engine], Metrics]:
        """Send all weights, or an ``adapter``, and before it the frozen weights where engines may not hold them. When a
        replica is lost, do so again with the others."""
        while True:
            try:
                return await self._send_all(source, generator, version, adapter)
            except ReplicaLostError as error:
                log.warning("weights are published again: %s", error)

    async def _send_all(
        self, source: WeightSource, generator: Refittable[Engine], version: int, adapter: Adapter | None
    ) -> tuple[Sequence[Engine], Metrics]:
        started = time.perf_counter()
        size, unread = 0, set[str]()
        async with generator.refit(version, adapter is not None) as engines:
            if self._engines != list(engines):  # one was lost, or started in the place of such
                self._engines, self._sender, self._base = list(engines), None, None
            contents: list[Content] = ["merged"]
            if adapter is not None:
                contents = ["adapter"] if self._base is source else ["base", "adapter"]
            self._base = None  # until all has come
            try:
                for content in contents:
                    handshake = await self._shake_hands(source, engines, generator.dtype, content)
                    await self._begin(engines, handshake, version, adapter if content == "adapter" else None)
                    sent, more = await self._send(source, engines, handshake)
                    size, unread = size + more, unread | await self._finish(engines, sent)
                    await source.end_weights()
            except BaseException:
                self._sender = None  # nobody knows how far it came
                raise
        self._base = source if adapter is not None else None
        metrics = Metrics().mean("refit/gigabytes", size / 1e9).mean("refit/unread", len(unread))
        return engines, metrics.mean("refit/seconds", time.perf_counter() - started)

    async def _shake_hands(
        self, source: WeightSource, engines: Sequence[Engine], dtype: torch.dtype, content: Content
    ) -> Handshake:
        """Tell the source what is wanted. Memory that it can't share with all engines is replaced by a collective."""
        config, anew = self.config, self._sender is not source
        if anew:
            self._transport = config.transport or "shared_memory"
            self._machines = set(await _tell(engines, "machine"))
        request = WeightRequest(
            dtype=dtype,
            bucket_bytes=config.bucket_bytes,
            digest=config.digest,
            content=content,
            transport=self._transport,
            anew=anew,
            receivers=sum(engine.ranks for engine in engines),
            folder=config.folder,
            deadline=config.deadline,
        )
        handshake = await source.begin_weights(request)
        if self._transport in ("shared_memory", "cuda_ipc") and self._machines != {handshake.machine}:
            if config.transport is not None:
                raise ConfigError(
                    f"weights.transport={config.transport} goes through a machine's memory, and the learner is on "
                    "another one than an engine; set weights.transport=collective, or leave it out"
                )
            self._transport = "collective"
            handshake = await source.begin_weights(replace(request, transport=self._transport))
        self._sender = source
        return handshake

    async def _begin(
        self, engines: Sequence[Engine], handshake: Handshake, version: int, adapter: Adapter | None
    ) -> None:
        columns = self.config.columns if self.config.digest else 0
        manifest = to_text(handshake.manifest) if handshake.manifest is not None else None
        seed = derive_seed("columns", version)
        answers: list[list[str]] = await _tell(engines, "begin", columns, seed, manifest, adapter)
        refused = sorted({name for answer in answers for name in answer})
        if refused:
            raise ConfigError(
                f"model.lora.target_modules: the engine can't apply LoRA to {', '.join(refused[:5])}"
                f"{f' and {len(refused) - 5} more' if len(refused) > 5 else ''}. Adapt other modules, or send merged "
                "weights: weights.lora=merged"
            )

    async def _connect(self, engines: Sequence[Engine], handshake: Handshake) -> None:
        if handshake.connection is not None:
            first = list(accumulate((engine.ranks for engine in engines), initial=1))
            way = self._transport, handshake.connection
            await of_each(engines, lambda engine, i: engine.call(RECEIVER, "connect", *way, first[i - 1]))

    async def _send(
        self, source: WeightSource, engines: Sequence[Engine], handshake: Handshake
    ) -> tuple[dict[str, int], int]:
        """Return (digests of what was sent, bytes)."""
        sent, size = dict[str, int](), 0
        engines_work: Awaitable[Any] = self._connect(engines, handshake)
        while True:
            bucket, _ = await _both(source.next_weights(), engines_work)
            if bucket is None:
                return sent, size
            sent |= bucket.digests
            size += bucket.bytes
            engines_work = _tell(engines, "take", bucket.number)

    async def _finish(self, engines: Sequence[Engine], sent: dict[str, int]) -> set[str]:
        """Check what all ranks report at the end; return the tensors that they can't tell of."""

        async def of(engine: Engine) -> set[str]:
            reports: list[Report] = await engine.call(RECEIVER, "finish")
            for rank, report in enumerate(reports) if self.config.digest else ():
                _check(sent, report, f"rank {rank} of the engine: " if len(reports) > 1 else "")
            return {name for report in reports for name in report["unread"]}

        return set().union(*await of_each(engines, lambda engine, _: of(engine)))

    async def _sample(self, engine: Engine, version: int) -> Completion:
        params = SamplingParams(self.config.probe_tokens, seed=0, distribution=self.distribution)
        completion = await engine.sample(self.text, params, f"probe/{version}")
        if completion.cached:
            raise RefitError(
                f"after publishing, the engine served {completion.cached} tokens of the probe's prompt from a cache "
                "that was filled under older weights: its prefix cache was not reset"
            )
        return completion


async def _tell(engines: Sequence[Engine], method: str, *args: Any) -> list[Any]:
    """Call a method of the receiver in every rank of every engine; return all answers."""
    answers = await of_each(engines, lambda engine, _: engine.call(RECEIVER, method, *args))
    return [answer for of_ranks in answers for answer in of_ranks]


async def _both(of_learner: Awaitable[Any], of_engines: Awaitable[Any]) -> tuple[Any, Any]:
    """Return what both return. When one side of a refit dies, the other one fails, too: raises the error that says who
    died."""
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
    """Raise ``RefitError`` where a rank did not get what was ``sent``, or computes with something else."""
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
            "after publishing, the engine's layers compute with other weights than it received: "
            f"{len(wrong)} of {len(sent)} tensors differ, the first {first}"
        )
    else:
        return
    raise RefitError(f"{where}{problem}. The run stops: its rollouts would be off-policy", tensors)
