"""The controller's side of a learner: whole batches in, whole columns out. It cuts a batch into micro-batches, hands
them to the workers, and puts their answers back in the batch's order. Knows no model and no device."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from whet.batch import Batch
from whet.cluster.base import Cluster, Placement, WorkerGroup
from whet.cluster.local import LocalCluster
from whet.errors import DeadlineError, WhetError
from whet.learner.base import LearnerFacts, Top, Update
from whet.learner.worker import LearnerWorker, RankUpdate, WorkerConfig
from whet.losses.base import Loss, Unit
from whet.metrics import Metrics
from whet.packing import MicroBatch, pack
from whet.processes.compute import compute
from whet.weights.source import Bucket, Handshake, WeightRequest

_ASKING = 0.1  # seconds between two questions whether a save is written


class WorkerLearner:
    """A ``Learner`` over a group of workers. Make one with ``launch``."""

    def __init__(self, group: WorkerGroup, config: WorkerConfig, facts: LearnerFacts) -> None:
        self._group, self._config, self.facts = group, config, facts

    @classmethod
    async def launch(cls, cluster: Cluster, config: WorkerConfig, placement: Placement | None = None) -> Self:
        """Build the workers. By default as many as the sizes of ``parallel`` ask for, with the learner's deadline."""
        sizes = config.parallel
        placement = placement or Placement(sizes.ranks, sizes.ranks_per_shard, config.learner.deadline)
        if placement.ranks > 1 and isinstance(cluster, LocalCluster):
            raise WhetError(
                f"a learner of {placement.ranks} ranks needs a process for each and a place to meet, and the local "
                "cluster is one process; use cluster=processes or cluster=ray"
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
        shards, kept = await compute(self._pack, batch, "token")
        answers = await self._group.scatter("score", shards, frozenset(columns), top) if shards else []
        return await compute(_columns, len(batch), kept, shards, answers, sorted(columns))

    async def release_reference(self) -> None:
        await self._group.call("release_reference")

    async def update(self, batch: Batch, loss: Loss) -> Update:
        """See ``Learner``. Reports the loss's own metrics and ``loss``, ``gradient_norm``, ``lr``, ``learner/tokens``
        (trained), ``learner/micro_batches``, ``learner/skipped`` (steps). A batch without a trained token changes
        nothing and is counted in ``learner/empty``."""
        self._check(batch, loss)
        shards, kept = await compute(self._pack, batch, loss.unit)
        answers: list[RankUpdate] = await self._group.scatter("update", shards, loss) if shards else []
        return await compute(_update, batch, kept, shards, answers)

    async def begin_weights(self, request: WeightRequest) -> Handshake:
        """See ``Learner``. A tied head is among them."""
        handshake: Handshake = (await self._group.call("weights.begin", request))[0]
        return handshake

    async def next_weights(self) -> Bucket | None:
        bucket: Bucket | None = (await self._group.call("weights.next"))[0]
        return bucket

    async def end_weights(self) -> None:
        await self._group.call("weights.end")

    async def save(self, folder: Path) -> None:
        await self._group.call("state.save", folder)

    async def begin_save(self, folder: Path) -> None:
        await self._group.call("state.begin_save", folder)

    async def finish_save(self) -> None:
        """See ``Learner``. Polls the workers, because one that waits could do nothing else."""
        deadline = self._config.learner.deadline
        try:
            async with asyncio.timeout(deadline):
                while not all(await self._group.call("state.save_written")):
                    await asyncio.sleep(_ASKING)
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
        """Make room on the devices; to be woken before the next update."""
        await self._group.call("sleep")

    async def wake(self, new_weights: bool = False) -> None:
        await self._group.call("wake")

    async def close(self) -> None:
        await self._group.close()

    def _pack(self, batch: Batch, unit: Unit) -> tuple[list[list[MicroBatch]], Tensor]:
        """Return micro-batches by shard, none where nothing is trained, and the indices of what is packed, [n]."""
        part, kept = trained_only(batch, unit)
        if not bool(part.trained.any()):
            return [], kept
        return pack(part, self._group.placement.shards, self._config.learner.max_tokens, unit), kept

    def _check(self, batch: Batch, loss: Loss) -> None:
        if batch.weight is None:
            raise WhetError("the batch has no weights; call Batch.weigh before an update")
        if empty := sorted(loss.reads - batch.filled):
            raise WhetError(f"the loss reads the columns {empty}, which nobody filled")


def trained_only(batch: Batch, unit: Unit) -> tuple[Batch, Tensor]:
    """Return the sequences that train something, and their tokens' indices: the others need not be computed. Losses
    that compare the members of a group keep all members of each group that trains something."""
    trains = batch.trained_per_sequence > 0
    if unit == "group":
        trains = torch.isin(batch.group, batch.group[trains])
    if bool(trains.all()):
        return batch, torch.arange(len(batch))
    return batch.select(trains.nonzero().squeeze(1))


def _columns(
    size: int,
    kept: Tensor,
    shards: list[list[MicroBatch]],
    answers: list[list[dict[str, Tensor]]],
    names: Iterable[str],
) -> dict[str, Tensor]:
    """Put the columns of micro-batches together to those of a whole batch of ``size`` tokens."""
    scored = [one for answer in answers for one in answer]
    return {name: _in_order(size, kept, shards, [one[name] for one in scored]) for name in names}


def _update(batch: Batch, kept: Tensor, shards: list[list[MicroBatch]], answers: list[RankUpdate]) -> Update:
    """Merge the ranks' answers of one step; without answers nothing was trained."""
    logprobs = _in_order(len(batch), kept, shards, [one for answer in answers for one in answer.logprobs])
    if not answers:
        return Update(Metrics().sum("learner/empty", 1), logprobs)
    return Update(_metrics(answers, int(batch.trained.sum()), sum(map(len, shards))), logprobs)


def _in_order(size: int, kept: Tensor, shards: list[list[MicroBatch]], parts: list[Tensor]) -> Tensor:
    whole = parts[0].new_zeros(size, *parts[0].shape[1:]) if parts else torch.zeros(size)
    for micro, part in zip((one for shard in shards for one in shard), parts, strict=True):
        trained = micro.batch.trained
        whole[kept[micro.tokens[trained]]] = part[trained]
    return whole


def _metrics(answers: list[RankUpdate], tokens: int, micro_batches: int) -> Metrics:
    metrics, first = Metrics(), answers[0]
    metrics.sum("learner/tokens", tokens).sum("learner/micro_batches", micro_batches)
    metrics.sum("learner/skipped", first.skipped)
    if first.skipped:  # what is not finite must not spoil the other numbers of the step
        return metrics
    for answer in answers:
        metrics.merge(answer.metrics)
    if "loss" not in metrics.result():
        metrics.mean("loss", sum(answer.loss for answer in answers))
    return metrics.mean("gradient_norm", first.gradient_norm).mean("lr", first.lr)
