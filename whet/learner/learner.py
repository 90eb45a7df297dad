"""The controller's side of a learner: whole batches in, whole columns out. It splits a batch into micro-batches, sends
them to the workers, and puts their results back in the batch's order. It has no model and no device."""

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from whet.base.errors import DataError, DeadlineError, WhetError
from whet.cluster.base import Cluster, Lead, Placement, WorkerGroup
from whet.cluster.local import LocalCluster
from whet.core.batch import Batch, ModelOutput
from whet.core.packing import Shard, idle_micro_batches, pack
from whet.learner.base import CONSTANT, LearnerFacts, RankUpdate, Top, Update
from whet.learner.config import WorkerConfig
from whet.learner.model import build_whole
from whet.learner.worker import LearnerWorker
from whet.losses.base import Loss
from whet.losses.weighted import WeightedLoss, at_trained
from whet.metrics import Metrics
from whet.models.flops import ModelFlops
from whet.processes.compute import compute
from whet.weights.source import Bucket, Handshake, WeightRequest

log = logging.getLogger(__name__)

_POLL_INTERVAL = 0.1  # least seconds between two polls of a background save
_POLLED_RANKS = 80.0  # most ranks that are polled per second


class WorkerLearner:
    """A ``Learner`` backed by a group of workers. Create one with ``launch``."""

    def __init__(self, group: WorkerGroup, config: WorkerConfig, facts: LearnerFacts) -> None:
        self._group, self._config, self.facts = group, config, facts
        self.flops = 0.0
        self._transfer: Lead | None = None  # of weights, the last one
        self._with_gradient = set[type]()  # losses that have had a gradient

    @classmethod
    async def launch(cls, cluster: Cluster, config: WorkerConfig) -> Self:
        """Start the workers: the number that ``parallel`` needs, with the learner's deadline."""
        sizes = config.parallel
        placement = Placement(sizes.ranks, sizes.ranks_per_shard, config.learner.deadline)
        if placement.ranks > 1 and isinstance(cluster, LocalCluster):
            raise WhetError(
                f"a learner of {placement.ranks} ranks needs one process per rank, but the local cluster is a single "
                "process; use cluster=processes or cluster=ray"
            )
        group = cluster.launch(LearnerWorker, config, placement)
        try:
            facts = (await group.call("facts"))[0]
        except BaseException:
            await group.close()
            raise
        return cls(group, config, facts)

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """See ``Learner``. 0 where untrained; where nothing is trained, every column is zeros, [N]."""
        passes = len({"reference_logprobs"} & columns) + (top is not None) + bool(_of_forward(columns, top))
        work = await compute(self._pack_trained, batch, passes)
        answers = await self._group.scatter("score", work.shards, frozenset(columns), top) if work.shards else []
        return await compute(_columns, work, answers, sorted(columns))

    async def release_reference(self) -> None:
        await self._group.call("release_reference")

    async def update(self, batch: Batch, loss: Loss) -> Update:
        """See ``Learner``. Reports the loss's metrics and ``loss``, ``gradient_norm``, ``lr``, ``learner/tokens``
        (trained), ``learner/micro_batches``, ``learner/zero_gradient`` (sequences that were not computed), and
        ``learner/skipped`` (steps). A batch without trained tokens changes nothing and is counted in
        ``learner/empty``; a micro-batch on whose outputs the loss doesn't depend, in ``learner/constant``. Raises
        ``DataError`` if these are all that the loss has had; if a state was loaded, it warns."""
        self._check(batch, loss)
        work = await compute(self._pack_update, batch, loss)
        answers: list[RankUpdate] = await self._group.scatter("update", work.shards, loss) if work.shards else []
        self._check_gradient(work, loss, answers)
        if answers and answers[0].skipped:
            log.warning("an optimizer step is skipped: %s", answers[0].skipped)
        return await compute(_update, work, loss, answers)

    async def begin_weights(self, request: WeightRequest) -> Handshake:
        """See ``Learner``. A tied head is included. Only the first rank is called for each bucket: all others are in
        one call, whatever the number of buckets, and follow it."""
        self._transfer = self._group.lead("weights.follow", request, until="weights.end")
        handshake: Handshake = await self._transfer.call("weights.begin", request)
        return handshake

    async def next_weights(self) -> Bucket | None:
        assert self._transfer is not None
        bucket: Bucket | None = await self._transfer.call("weights.next")
        return bucket

    async def end_weights(self) -> None:
        assert self._transfer is not None
        await self._transfer.end()

    def abandon_weights(self) -> None:
        if self._transfer is not None:
            self._transfer.abandon()

    async def save(self, folder: Path) -> None:
        await self._group.call("state.save", folder)

    async def begin_save(self, folder: Path) -> None:
        await self._group.call("state.begin_save", folder)

    async def finish_save(self) -> None:
        """See ``Learner``. Polls the workers, because a worker that waited could do nothing else; the more ranks, the
        less often, so that polling takes no more of this process."""
        deadline = self._config.learner.deadline
        interval = max(_POLL_INTERVAL, min(self._group.placement.ranks / _POLLED_RANKS, deadline / 10))
        try:
            async with asyncio.timeout(deadline):
                while not all(await self._group.call("state.save_written")):
                    await asyncio.sleep(interval)
        except TimeoutError:
            raise DeadlineError(
                f"a save in the background was not written within learner.deadline = {deadline:g} s; look at the "
                "disk of the run folder"
            ) from None
        await self._group.call("state.finish_save")

    async def load(self, folder: Path) -> None:
        await self._group.call("state.load", folder)
        self.facts = (await self._group.call("facts"))[0]

    async def sleep(self, new_weights: bool = False) -> None:
        """Free memory on the devices until ``wake``, which must be called before the next update."""
        await self._group.call("sleep")

    async def wake(self, new_weights: bool = False) -> None:
        await self._group.call("wake")

    async def begin_profile(self, micro_batches: int) -> None:
        await self._group.call("begin_profile", micro_batches)

    async def end_profile(self, path: Path) -> None:
        await self._group.call("end_profile", path)

    async def close(self) -> None:
        await self._group.close()

    def _pack_trained(self, batch: Batch, passes: int) -> "_Work":
        """Pack the sequences with trained tokens for a number of forward passes; the others need not be computed."""
        work = self._pack(batch, _none(batch), computed(batch))
        self.flops += passes * self._needed(work)
        return work

    def _pack_update(self, batch: Batch, loss: Loss) -> "_Work":
        """Pack the sequences that contribute to the gradient. Losses over groups get all members of each group with
        trained tokens. If routers are balanced, every token is counted, so all sequences are computed."""
        zero, balanced = _none(batch), self._config.learner.balance is not None
        if isinstance(loss, WeightedLoss) and not balanced and batch.rollout_logprobs is not None:
            zero = torch.cat([loss.zero_gradient(part) for part in batch.parts()]) & (batch.trained_per_sequence > 0)
        work = self._pack(batch, zero, computed(batch, loss.unit == "group", zero), loss.unit)
        self.flops += self._needed(work, backward=True)
        return work

    def _needed(self, work: "_Work", backward: bool = False) -> float:
        """Return the floating-point operations of a pass over the micro-batches of all ranks."""
        if self._parts is None:
            return 0.0
        batches = (micro.batch for shard in work.shards for micro in shard.bare())
        return sum(self._parts.needed(batch.position, int(batch.trained.sum()), backward) for batch in batches)

    @cached_property
    def _parts(self) -> ModelFlops | None:
        config = self._config
        trains, value = config.optimizer is not None, config.head == "value"
        try:  # the number of operations is the same in every precision
            built = build_whole(config.model, "float32", trains, value, config.seed, torch.device("meta"))
            return ModelFlops.of(built.model, value)
        except Exception as error:  # of an architecture that can't be built without weights; it is only a measure
            log.warning("the floating-point operations of this model can't be counted: %s", error)
            return None

    def _pack(self, batch: Batch, zero: Tensor, sequences: Tensor, unit: str = "token") -> "_Work":
        ranks, learner = self._group.placement.shards, self._config.learner
        self._check_tokens(batch)
        if sequences.numel():
            return _Work(batch, pack(batch, ranks, learner.max_tokens, unit, learner.pack_tokens, sequences), zero)
        if not bool(batch.trained.any()):
            return _Work(batch, [], zero)
        # A gradient of 0 is a step too: moments and the schedule advance.
        return _Work(batch, idle_micro_batches(batch, ranks, unit), zero)

    def _check_tokens(self, batch: Batch) -> None:
        largest, vocabulary = int(batch.tokens.max()) if len(batch) else 0, self.facts.vocabulary
        if largest >= vocabulary:
            raise DataError(
                f"the batch has token {largest}, and the model {self._config.model.path} has only {vocabulary} tokens: "
                "the tokenizer or the engine that the token comes from is another model's"
            )

    def _check(self, batch: Batch, loss: Loss) -> None:
        if batch.share is None:
            raise WhetError("the batch has no weights; call Batch.weigh before an update")
        if empty := sorted(loss.reads - batch.filled):
            raise WhetError(f"the loss reads the columns {empty}, which are not filled")

    def _check_gradient(self, work: "_Work", loss: Loss, answers: list[RankUpdate]) -> None:
        constant = sum(answer.metrics.result().get(CONSTANT, 0) for answer in answers)
        if constant < sum(map(len, work.shards)):
            self._with_gradient.add(type(loss))
        elif answers and type(loss) not in self._with_gradient:
            what = f"the loss {type(loss).__name__} has no gradient: it doesn't depend on the model's outputs"
            if self.facts.steps_done == 0:
                raise DataError(what)
            log.warning("%s, at least since the run was resumed", what)  # it may have had one before


@dataclass(slots=True, frozen=True)
class _Work:
    """A batch, packed for the workers."""

    batch: Batch
    shards: list[Shard]  # by data-parallel rank; empty if nothing is trained
    zero: Tensor  # [S] bool: trained, but not computed, because the gradient is exactly 0

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Put the columns of the micro-batches, [n, ...] each, into the order of the batch, 0 elsewhere. [N, ...]"""
        size = len(self.batch)
        whole = parts[0].new_zeros(size, *parts[0].shape[1:]) if parts else torch.zeros(size)
        for micro, part in zip((micro for shard in self.shards for micro in shard.bare()), parts, strict=True):
            trained = micro.batch.trained
            whole[micro.tokens[trained]] = part[trained]
        return whole


def computed(batch: Batch, whole_groups: bool = False, without: Tensor | None = None) -> Tensor:
    """Return the sequences with trained tokens, without the sequences of ``without`` ([S] bool). With ``whole_groups``
    all members of a group are kept if one of them has trained tokens. [s] int64, ascending"""
    trains = batch.trained_per_sequence > 0
    if without is not None:
        trains &= ~without
    if whole_groups:
        trains = torch.isin(batch.group, batch.group[trains])
    return trains.nonzero().squeeze(1)


def _of_forward(columns: set[str], top: Top | None) -> set[str]:
    """Return the columns that the model itself gives, without the most likely tokens."""
    return columns - {"reference_logprobs"} - ({"topk", "topk_ids"} if top is not None else set())


def _none(batch: Batch) -> Tensor:
    return torch.zeros(batch.sequences, dtype=torch.bool)


def _columns(work: _Work, answers: list[list[dict[str, Tensor]]], names: Iterable[str]) -> dict[str, Tensor]:
    """Join the columns of micro-batches into the columns of the whole batch."""
    scored = [columns for answer in answers for columns in answer]
    return {name: work.in_order([columns[name] for columns in scored]) for name in names}


def _update(work: _Work, loss: Loss, answers: list[RankUpdate]) -> Update:
    """Merge the ranks' results of one step; without results nothing was trained."""
    batch = work.batch
    logprobs = work.in_order([column for answer in answers for column in answer.logprobs])
    if not answers:
        return Update(Metrics().sum("learner/empty", 1), logprobs)
    metrics = Metrics()
    if bool(work.zero.any()):
        logprobs[batch.trained & work.zero[batch.sequence.clamp(min=0)]] = math.nan
        if not answers[0].skipped:
            metrics.merge(_metrics_of_zero(work, loss))
    metrics.merge(_metrics(answers, int(batch.trained.sum()), sum(map(len, work.shards))))
    return Update(metrics.sum("learner/zero_gradient", int(work.zero.sum())), logprobs)


@torch.no_grad()
def _metrics_of_zero(work: _Work, loss: Loss) -> Metrics:
    """Return the metrics of the sequences that were not computed, from their old log-probs or, without these, the
    sampler's, so that every metric of the loss covers all trained tokens."""
    part, _ = work.batch.select(work.zero.nonzero().squeeze(1))
    logprobs = part.column("rollout_logprobs") if part.old_logprobs is None else part.old_logprobs
    return loss(ModelOutput(at_trained(part, logprobs)), part)[1].read()


def _metrics(answers: list[RankUpdate], tokens: int, micro_batches: int) -> Metrics:
    metrics, first = Metrics(), answers[0]
    metrics.sum("learner/tokens", tokens).sum("learner/micro_batches", micro_batches)
    metrics.sum("learner/skipped", bool(first.skipped))
    if first.skipped:  # values that are not finite must not affect the step's other metrics
        return metrics
    of_loss = Metrics()
    for answer in answers:
        of_loss.merge(answer.metrics)
    if "loss" not in of_loss.result():
        of_loss.mean("loss", sum(answer.loss for answer in answers))
    return metrics.join(of_loss).join(Metrics().mean("gradient_norm", first.gradient_norm).mean("lr", first.lr))
