"""The supply of a run that learns from rows of a data set, and the measures of the rows that are held out."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.base.errors import DataError
from whet.base.progress import PROGRESS
from whet.base.scratch import Scratch
from whet.chat.renderer import Renderer
from whet.core.batch import Batch, ModelOutput
from whet.core.types import Distribution, Group
from whet.data.source import DatasetSource
from whet.learner.base import Learner, Scorer
from whet.learner.cached_reference import CachedReference
from whet.metrics.statistics import wilson
from whet.models.loading import fingerprint
from whet.processes.compute import compute
from whet.run.feed import Feed
from whet.run.machine import decide

if TYPE_CHECKING:
    from whet.losses.base import Loss
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

REFERENCE_FILE = "reference.safetensors"  # in the run folder


class RowsFeed(Feed):
    """Rows of a data set. Nothing is sampled, so there is no generator and nothing to publish to."""

    def __init__(self, recipe: "Recipe", renderer: Renderer) -> None:
        self.recipe, self.renderer = recipe, renderer
        self.judging = recipe.algorithm.main.head == "value"
        self.rows = recipe.rows.groups(renderer, judging=self.judging)
        super().__init__(self._source(), Distribution(), recipe.rows.longest, len(self.rows["train"]))
        self._held_out: tuple[Batch, list[Group]] | None = None

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        """If the algorithm caches its reference, score the batches of all steps to come and the held-out rows."""
        recipe, algorithm = self.recipe, self.recipe.algorithm
        if not algorithm.main.caches_reference:
            return learners
        cached = self._cached(learners, folder)
        scorers: dict[str, Scorer] = {**learners, algorithm.main_role: cached}
        rows = self._source()
        rows.load_state(self.source.state())
        with cached.filling():
            if recipe.evaluation.enabled:
                await self._held_out_batch(scorers)
            for _ in PROGRESS.each(steps, "steps scored by the reference"):
                groups = await rows.next_groups()
                await algorithm.prepare(await compute(self._batch, groups, scorers), groups, scorers)
        await cached.finish()
        return scorers

    def _source(self) -> DatasetSource:
        rows, train = self.recipe.rows, self.rows["train"]
        return DatasetSource(train, rows.batch_size, order=rows.order(train, self.recipe.seed))

    def _cached(self, learners: Mapping[str, Learner], folder: Path, read_only: bool = False) -> CachedReference:
        learner = learners[self.recipe.algorithm.main_role]
        return CachedReference(learner, folder / REFERENCE_FILE, self._reference_facts(learners), read_only)

    def looking_up(self, learners: Mapping[str, Learner], run: Path) -> Mapping[str, Scorer]:
        """Return the learners, with the reference log-probs that a run has cached; its file isn't changed."""
        if not self.recipe.algorithm.main.caches_reference or not (run / REFERENCE_FILE).exists():
            return learners
        return {**learners, self.recipe.algorithm.main_role: self._cached(learners, run, read_only=True)}

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        """Return the loss on the held-out rows and, for judged rows, the share of right judgements; of a mixture also
        of each part that has held-out rows."""
        algorithm = self.recipe.algorithm
        batch = await self._held_out_batch(scorers)
        if batch is None:
            log.warning("no row is held out, so nothing is evaluated; give data.test_path, or more rows")
            return {}
        assert self._held_out is not None
        names = [group.task.environment for group in self._held_out[1]]
        weigh = partial(Batch.weigh, weighting=algorithm.weighting, divisor=self.longest)
        return await measure(batch, algorithm.losses[algorithm.main_role], scorers[algorithm.main_role], weigh, names)

    async def _held_out_batch(self, scorers: Mapping[str, Scorer]) -> Batch | None:
        """Return the held-out rows, laid out and scored by the reference once; columns that depend on the policy are
        filled each time. None if no row is held out."""
        algorithm = self.recipe.algorithm
        if self._held_out is None:
            groups = self._groups()
            if not groups:
                return None
            batch = await compute(self._batch, groups, scorers)
            self._held_out = await compute(batch.weigh, algorithm.weighting, self.longest), groups
        batch, groups = self._held_out
        await algorithm.prepare(batch, groups, scorers)
        return batch

    def _batch(self, groups: list[Group], scorers: Mapping[str, Scorer]) -> Batch:
        forest = all(scorer.facts.forest for scorer in scorers.values())
        return Batch.from_groups(groups, share_prompts=forest)

    def _groups(self) -> list[Group]:
        config = self.recipe.evaluation
        rows = self.rows[config.split]
        groups, left_out = list[Group](), Counter[str]()
        for index in range(len(rows)):
            if len(groups) == config.limit:
                break
            group = rows[index]
            if isinstance(group, str):
                left_out[group] += 1
            else:
                groups.append(group)
        for reason, count in left_out.items():
            read = len(groups) + left_out.total()
            log.warning("%d of %d rows of the %s split are left out: %s", count, read, config.split, reason)
        return groups

    def _reference_facts(self, learners: Mapping[str, Learner]) -> dict[str, str]:
        """Return the facts that, with the tokens, decide the reference log-probs."""
        facts = learners[self.recipe.algorithm.main_role].facts
        return {
            "model": fingerprint(self.recipe.model),
            "chat template": self.renderer.template,
            "precision": f"{facts.precision} {facts.matmul_precision}",
        }


async def measure_rows(recipe: "Recipe", run: Path | None = None) -> dict[str, float]:
    """Measure the recipe's held-out rows under a run's best checkpoint (the newest if none was evaluated), or under the
    model that a run would start from. Raises ``DataError`` if no row is held out."""
    from whet.checkpoint.store import Checkpoint, CheckpointStore
    from whet.run.build import build_renderer, open_cluster, open_learners

    recipe, _ = await compute(decide, recipe)
    feed = RowsFeed(recipe, build_renderer(recipe))
    with Scratch("measure") as scratch:  # where learners would dump skipped steps
        async with open_cluster(recipe) as cluster, open_learners(recipe, scratch, cluster) as learners:

            async def load(checkpoint: Checkpoint) -> None:
                for role in recipe.algorithm.losses:
                    await learners[role].load(checkpoint.folder / role)

            if run is not None:
                await CheckpointStore(run / "checkpoints", recipe.checkpoints).read_async(load)
            PROGRESS.begin("evaluating")
            values = await feed.evaluate(learners if run is None else feed.looking_up(learners, run))
    if not values:
        raise DataError("no row is held out, so there is nothing to measure on; give data.test_path, or more rows")
    return values


async def measure(
    batch: Batch, loss: "Loss", scorer: Scorer, weigh: Callable[[Batch], Batch], names: Sequence[str]
) -> dict[str, float]:
    """Return a loss over a weighed batch, without learning: ``evaluation/loss`` over ``evaluation/n`` rows; for judged
    rows also ``evaluation/accuracy``, with Wilson's interval (``low``, ``high``); of pairs also ``evaluation/margin``.
    ``names``: of the part of a mixture that each group is from, or empty; ``evaluation/NAME/...`` are its numbers."""
    scored = await scorer.score(batch, set(loss.outputs))
    values = await compute(_measured, loss, scored, batch)
    for name in sorted({*names} - {""}):
        of_part = torch.tensor([each == name for each in names])
        part, tokens = batch.select(of_part[batch.group].nonzero().squeeze(1))
        outputs = {column: output[tokens] for column, output in scored.items()}
        numbers = await compute(_measured, loss, outputs, weigh(part))
        values |= {key.replace("/", f"/{name}/", 1): value for key, value in numbers.items()}
    return values


def _measured(loss: "Loss", scored: dict[str, Tensor], batch: Batch) -> dict[str, float]:
    """Return the numbers of ``measure`` without parts."""
    scored.setdefault("logprobs", torch.zeros(len(batch)))  # of a value head, or if the loss reads none
    measured = loss(ModelOutput(**scored), batch)[1].result()
    n = batch.group[batch.trained_per_sequence > 0].unique().numel()  # a loss leaves out groups without trained tokens
    if n == 0:
        return {"evaluation/n": 0.0}
    values = {"evaluation/loss": measured["loss"], "evaluation/n": float(n)}
    if "preference/accuracy" in measured:
        accuracy = measured["preference/accuracy"]
        low, high = wilson(accuracy * n, n)
        values |= {"evaluation/accuracy": accuracy, "evaluation/low": low, "evaluation/high": high}
    if "preference/margin" in measured:
        values["evaluation/margin"] = measured["preference/margin"]
    return values
