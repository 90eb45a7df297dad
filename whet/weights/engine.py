"""Weights go from a learner to engines in other processes, bucket by bucket, and their arrival is proven three times:
by a digest of every tensor that came, computed there; by reading back what the engine's layers compute with; and by a
probe of its decode path. Knows no engine by name and no algorithm.

The learner's ranks write the buckets themselves; only word of them passes through here. Who waits for what: all
engines are paused before the first bucket and sample again once digests and layers of all agree. A bucket is written
while the one before it is loaded. If the probe then disagrees, the run stops before anything that was sampled is
learned from.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from whet.cluster.lease import Devices
from whet.errors import ConfigError, DeadlineError, GeneratorError, RefitError, WhetError, WorkerError
from whet.generators.base import Completion, Generator, SamplingParams
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.seeds import derive_seed
from whet.types import Distribution
from whet.weights.base import NOBODY_SHARES, of_each, replicas
from whet.weights.config import WeightSyncConfig
from whet.weights.digest import differing
from whet.weights.local import LocalSource, Relay
from whet.weights.parcel import Content, Named, Opening, Sending, WeightSource
from whet.weights.probe import compare_decoding
from whet.weights.sender import machine

RECEIVER = "whet.weights.receiver:Receiver"
_PATIENCE = 5.0  # seconds that an engine has to say why, when the learner could not go on
Adapter = tuple[int, float]
"""LoRA's rank and alpha: B A counts alpha / rank times."""


class Engine(Generator, Protocol):
    """A generator whose model lives in other processes."""

    weights_complete: bool
    refitting: bool  # weights are on their way, and requests wait for them
    under_adapter: bool  # whether requests are to be answered with the LoRA adapter that came

    @property
    def ranks(self) -> int:
        """How many processes hold the model, each a part of every matrix."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        """Call ``method`` of the object that ``module:Class`` makes of the model, in each process that holds it."""
        ...


class EngineSync:
    """Publishes the weights of a learner to an engine, or to the engines behind a router. ``text`` is what the probe
    continues, under ``distribution``: long enough to fill a block of the engine's prefix cache, so that a kept cache
    shows."""

    def __init__(
        self,
        config: WeightSyncConfig,
        text: list[int],
        distribution: Distribution | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.config, self.text, self.devices = config, text, devices or NOBODY_SHARES
        self.distribution = distribution or Distribution()
        self._known: str | None = None  # what the engines were told of how weights are packed and come
        self._sender: WeightSource | None = None  # to whom they were told that
        self._base: WeightSource | None = None  # whose frozen weights they hold, which an adapter needs

    async def publish(self, learner: Learner, generator: Any, version: int) -> Metrics:
        """See ``WeightSync``. Reports ``refit/seconds`` (how long nothing was sampled), ``refit/gigabytes`` and
        ``refit/unread`` (tensors that could not be read back), and the probe's metrics."""
        async with self.devices.lent_to("generation"):
            metrics = await self._refit(learner, generator, version, self._adapter(learner))
            if not self.config.probe:
                return metrics
            sampled = await of_each(replicas(generator), lambda engine, _: self._sample(engine, version))
        async with self.devices.lent_to("learning"):
            for engine, completion in zip(replicas(generator), sampled, strict=True):
                metrics.merge(await self._compare(learner, engine, completion))
        return metrics

    async def load(self, weights: Named, generator: Any, version: int) -> Metrics:
        """See ``WeightSync``."""
        source = LocalSource(weights)
        try:
            return await self._refit(source, generator, version)
        finally:
            source.close()

    def _adapter(self, learner: Learner) -> Adapter | None:
        """Of LoRA that travels alone."""
        if self.config.lora == "merged":
            return None
        lora = learner.facts.model.lora
        if lora is None:
            raise ConfigError("weights.lora=adapter sends what LoRA trains, and model.lora is not set")
        return lora.rank, lora.alpha

    async def _refit(
        self, source: WeightSource, generator: Any, version: int, adapter: Adapter | None = None
    ) -> Metrics:
        """All weights, or an ``adapter``, and before it the frozen weights where engines may not hold them."""
        started = time.perf_counter()
        engines: Sequence[Engine] = replicas(generator)
        for engine in engines:
            engine.refitting = True
        try:
            await generator.pause()
            for engine in engines:
                engine.weights_complete = False
            size, unread = await self._replace(source, engines, version, adapter)
            for engine in engines:
                engine.weights_complete, engine.under_adapter = True, adapter is not None
            await generator.resume(version)
        finally:
            for engine in engines:
                engine.refitting = False
        metrics = Metrics().mean("refit/gigabytes", size / 1e9).mean("refit/unread", len(unread))
        return metrics.mean("refit/seconds", time.perf_counter() - started)

    async def _replace(
        self, source: WeightSource, engines: Sequence[Engine], version: int, adapter: Adapter | None
    ) -> tuple[int, set[str]]:
        """See ``_send``."""
        whole: Content = "merged" if adapter is None else "base"
        there, self._base = self._base is source, None  # until all has come
        size, unread = 0, set[str]()
        try:
            if adapter is None or not there:
                size, unread = await self._send(source, engines, version, whole)
            if adapter is not None:
                more, unknown = await self._send(source, engines, version, "adapter", adapter)
                size, unread, self._base = size + more, unread | unknown, source
        except BaseException:
            if isinstance(self._sender, Relay):
                self._sender.close()
            self._known = self._sender = None  # nobody knows how far it came
            raise
        return size, unread

    async def _send(
        self,
        source: WeightSource,
        engines: Sequence[Engine],
        version: int,
        content: Content,
        adapter: Adapter | None = None,
    ) -> tuple[int, set[str]]:
        """(bytes, names of the tensors that could not be read back)."""
        source, opening = await self._open(source, engines, content)
        columns = self.config.columns if self.config.digest else 0
        seed = derive_seed("columns", version)
        first = list(accumulate((engine.ranks for engine in engines), initial=1))
        answers = await of_each(
            engines,
            lambda engine, i: engine.call(RECEIVER, "begin", columns, seed, opening.layout, first[i - 1], adapter),
        )
        _check_taken({name for answer in answers for refused in answer for name in refused})
        if opening.setup is not None:
            await _tell(engines, *opening.setup)
        sent: dict[str, int] = {}
        size = 0
        taking: asyncio.Task[None] | None = None
        try:
            while (parcel := await source.next_weights()) is not None:
                sent |= parcel.digests
                size += parcel.bytes
                if taking is not None:
                    await taking
                taking = asyncio.ensure_future(_tell(engines, parcel.method, parcel.arguments))
            if taking is not None:
                await taking
        except WhetError as error:
            raise await _cause(error, taking) from error
        finally:
            if taking is not None:
                taking.cancel()
        unread: set[str] = set()
        for report in await of_each(engines, lambda engine, _: self._finish(engine, sent)):
            unread |= report
        await source.end_weights()
        self._known = opening.known
        return size, unread

    async def _open(
        self, source: WeightSource, engines: Sequence[Engine], content: Content
    ) -> tuple[WeightSource, Opening]:
        """Begin, over what lies between the learner and here."""
        config, transport = self.config, self.config.transport or "shared_memory"
        if isinstance(self._sender, Relay) and self._sender.source is source:
            source = self._sender
        sending = Sending(
            dtype=engines[0].dtype,
            bucket_bytes=int(config.bucket_mb * 2**20),
            digest=config.digest,
            transport=transport,
            known=self._known if self._sender is source else None,
            takers=sum(engine.ranks for engine in engines),
            folder=config.folder,
            deadline=config.deadline,
            content=content,
        )
        opening = await source.begin_weights(sending)
        if transport == "cuda_ipc" and opening.machine != machine():
            raise ConfigError(
                "weights.transport=cuda_ipc shares the memory of this machine's GPUs, and the learner is on another "
                "one; set weights.transport=collective or shared_memory"
            )
        if transport == "shared_memory" and opening.machine != machine():
            await source.end_weights()
            source = Relay(source)
            opening = await source.begin_weights(sending)
        self._sender = source
        return source, opening

    async def _finish(self, engine: Engine, sent: dict[str, int]) -> set[str]:
        """Check what an engine says at the end; the tensors that it can't tell of."""
        unread: set[str] = set()
        reports = await engine.call(RECEIVER, "finish")
        for rank, report in enumerate(reports):
            self._check(sent, report, f"rank {rank} of the engine: " if len(reports) > 1 else "")
            unread |= set(report["unread"])
        return unread

    def _check(self, sent: dict[str, int], report: dict[str, Any], where: str) -> None:
        if not self.config.digest:
            return
        wrong = differing(sent, report["digests"])
        if wrong:
            raise RefitError(
                f"{where}after publishing, the engine did not receive the learner's weights: {len(wrong)} of "
                f"{len(sent)} tensors are missing or differ, the first {', '.join(wrong[:5])}. The run stops: its "
                "rollouts would be off-policy"
            )
        if report["missing"]:
            raise RefitError(
                f"{where}after publishing, {len(report['missing'])} parameters of the engine have no new weight, "
                f"the first {', '.join(report['missing'][:5])}: learner and engine do not have the same architecture"
            )
        if report["wrong"]:
            raise RefitError(
                f"{where}after publishing, the engine's layers compute with other weights than it received: "
                f"{len(report['wrong'])} of {len(sent)} tensors differ, the first {', '.join(report['wrong'][:5])}. "
                "The run stops: its rollouts would be off-policy"
            )

    async def _sample(self, engine: Engine, version: int) -> Completion:
        params = SamplingParams(self.config.probe_tokens, seed=0, distribution=self.distribution)
        completion = await engine.sample(self.text, params, f"probe/{version}")
        if completion.cached:
            raise RefitError(
                f"after publishing, the engine served {completion.cached} tokens of the probe's prompt from a cache "
                "that was filled under older weights: its prefix cache was not reset"
            )
        return completion

    async def _compare(self, learner: Learner, engine: Engine, completion: Completion) -> Metrics:
        return await compare_decoding(
            learner,
            self.text,
            completion.tokens,
            completion.logprobs,
            self.config,
            dtype=engine.dtype,
            distribution=self.distribution,
        )


async def _cause(error: WhetError, taking: "asyncio.Task[None] | None") -> WhetError:
    """When one side of a refit dies, the other one fails too: the error that says who died. ``error`` is the learner's,
    or that of ``taking``, what the engines were doing."""
    errors = [error]
    if taking is not None and (await asyncio.wait({taking}, timeout=_PATIENCE))[0] and not taking.cancelled():
        other = taking.exception()
        errors += [other] if isinstance(other, WhetError) else []
    return min(
        errors, key=lambda one: (not isinstance(one, GeneratorError | WorkerError), isinstance(one, DeadlineError))
    )


def _check_taken(refused: set[str]) -> None:
    if refused:
        raise ConfigError(
            f"model.lora.target_modules: the engine can't apply LoRA to {', '.join(sorted(refused)[:5])}"
            f"{f' and {len(refused) - 5} more' if len(refused) > 5 else ''}. Adapt other modules, or send merged "
            "weights: weights.lora=merged"
        )


async def _tell(engines: Sequence[Engine], method: str, arguments: tuple[Any, ...]) -> None:
    await of_each(engines, lambda engine, _: engine.call(RECEIVER, method, *arguments))
