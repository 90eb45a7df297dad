"""The supply of a run: episodes that its policy plays, or rows of a data set, to learn from and to evaluate on. A feed
has a source of groups, receives each new version of the weights, and evaluates; the loop treats both kinds alike."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.algorithms.base import OnlineAlgorithm
from whet.base.closing import Closing
from whet.base.errors import DataError, WhetError
from whet.base.progress import PROGRESS
from whet.base.scratch import Scratch
from whet.chat.renderer import Renderer
from whet.cluster.lease import Devices
from whet.core.batch import Batch, ModelOutput
from whet.core.content import text_of
from whet.core.types import Distribution, Group, Message, Task
from whet.data.source import DatasetSource, Source
from whet.endpoint.server import Endpoint
from whet.engines.base import PausableEngine, pausable
from whet.learner.base import Learner, Scorer
from whet.learner.cached_reference import CachedReference
from whet.losses.off_policy import MISMATCH
from whet.metrics import Metrics
from whet.metrics.rollout_file import write_rollouts
from whet.metrics.statistics import wilson
from whet.models.loading import fingerprint
from whet.processes.compute import compute
from whet.rollouts.blend import Blend
from whet.rollouts.filters import Filter
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.no_signal import NoSignal
from whet.rollouts.recorder import failures, records
from whet.rollouts.replay import KeptSource, keep_groups
from whet.rollouts.source import RolloutSource
from whet.run.build import build_generator, build_sync
from whet.run.evaluate import evaluate_all
from whet.run.machine import decide
from whet.run.policy import Sampler
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.validate import require

if TYPE_CHECKING:
    from whet.losses.base import Loss
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

REFERENCE_FILE = "reference.safetensors"  # in the run folder


class Feed:
    """The supply of groups of one run. By default nothing is prepared, measured, checked or recorded."""

    def __init__(
        self, source: Source, distribution: Distribution, longest: int | None, groups_per_epoch: int = 0
    ) -> None:
        """``distribution``: that log-probs are taken under. ``longest``: the most tokens that an answer may have, which
        ``weighting=constant`` divides by. ``groups_per_epoch``: the number of tasks or rows; 0 if there is none."""
        self.source, self.distribution, self.longest = source, distribution, longest
        self.groups_per_epoch = groups_per_epoch
        self.sampler: Sampler | None = None

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        """Do what is to be done once before the ``steps`` (from 0; steps that are done are not in the range). Return
        the scorers for them."""
        return learners

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        """Return one evaluation line; empty where there is nothing to measure on."""
        return {}

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the metrics of a step. Raises ``WhetError`` if the run must not continue."""

    def record(self, folder: Path, step: int, groups: list[Group], batch: Batch) -> None:
        """Write what was sampled into the run folder."""

    async def close(self) -> None:
        """Close what the feed holds."""


def build_feed(recipe: "Recipe", renderer: Renderer, devices: Devices) -> Feed:
    """Return the feed that the recipe's algorithm learns from. A generator becomes a tenant of the devices."""
    online = isinstance(recipe.algorithm, OnlineAlgorithm)
    if online and recipe.rollouts.replay is not None:
        kept = KeptSource(Path(recipe.rollouts.replay))
        return Feed(kept, recipe.sampling.distribution, recipe.sampling.max_new_tokens)
    return SampledFeed(recipe, renderer, devices=devices) if online else RowsFeed(recipe, renderer)


class SampledFeed(Feed):
    """Episodes of the policy over a task set, through a generator. ``filters`` are the algorithm's by default."""

    def __init__(
        self,
        recipe: "Recipe",
        renderer: Renderer,
        filters: tuple[Filter, ...] | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.recipe, self.renderer = recipe, renderer
        self.devices = devices or Devices({}, shared=False)
        self.generator = build_generator(recipe, renderer)
        if recipe.devices.placement == "colocated" or isinstance(self.generator, PausableEngine):
            self.devices.tenants["generation"] = pausable(self.generator, "devices.placement=colocated")
        else:
            self.devices.shared = False  # it keeps its weights while the learner computes
        self.environments = IsolatedEnvironments(recipe.taskset.open())
        self.endpoint = Endpoint(renderer, recipe.endpoint)
        player = GroupPlayer(
            recipe.rollouts,
            recipe.sampling,
            self.environments,
            self.generator,
            renderer,
            rewards=recipe.rewards,
            blend=recipe.taskset if isinstance(recipe.taskset, Blend) else None,
            seed=recipe.seed,
            endpoint=self.endpoint,
        )
        source = RolloutSource(
            recipe.rollouts,
            recipe.taskset.tasks("train"),
            player,
            group_size=recipe.online.group_size,
            filters=recipe.online.filters if filters is None else filters,
            pairing=recipe.online.pairing if filters is None else (),
            seed=recipe.seed,
        )
        super().__init__(source, recipe.sampling.distribution, recipe.sampling.max_new_tokens, len(source.tasks))
        self._disagrees = False  # in the last step
        estimator = recipe.online.estimator
        self._no_signal = NoSignal() if estimator is not None and estimator.compares else None
        self.rollouts = source
        sync = build_sync(recipe, _probe_text(renderer, source.tasks[0]), self.devices)
        self.sampler = Sampler(player, self.generator, sync)

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        self.recipe.weights.check_device(learners["policy"].facts.device)
        self.rollouts.ledger.compare(folder)
        if self.recipe.validation.required:
            await require(self.recipe.taskset, self.recipe.validation.samples)
        return learners

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        async with self.devices.acquire("generation"):
            report = await evaluate_all(self.recipe, self.environments, self.generator, self.renderer, self.endpoint)
        return report.metrics()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warn at the first step at which generator and learner disagree, and if nothing can be learned. Raises
        ``WhetError`` above ``rollouts.max_mismatch``."""
        if self._no_signal is not None:
            self._no_signal.check(step, values)
        rollouts, error, old = self.recipe.rollouts, values.get(MISMATCH, 1.0), values.get("staleness/max", 0.0)
        cause = "`whet doctor RECIPE` looks for the cause"
        if old:
            cause = f"Some were sampled by weights {old:g} steps old, which explains a part of it; {cause} of the rest"
        message = (
            f"in step {step} {MISMATCH} is {error:.4g}, above rollouts.{{}} = {{:g}}: the log-probs that the generator "
            f"gives its tokens are not the learner's. {cause}"
        )
        if rollouts.max_mismatch is not None and error > rollouts.max_mismatch:
            raise WhetError(message.format("max_mismatch", rollouts.max_mismatch))
        disagrees = error > rollouts.mismatch_alarm
        if disagrees and not self._disagrees:
            log.warning(message.format("mismatch_alarm", rollouts.mismatch_alarm))
        self._disagrees = disagrees

    def record(self, folder: Path, step: int, groups: list[Group], batch: Batch) -> None:
        self.rollouts.ledger.write(folder)
        if self.recipe.rollouts.keep_groups:
            keep_groups(folder, step, groups)
        every = self.recipe.rollouts.record_every
        if every and step % every == 0:
            lost = failures(step, self.rollouts.lost)
            write_rollouts(folder, step, [*records(step, groups, batch, self.renderer), *lost])

    async def close(self) -> None:
        async with Closing() as closing:
            closing.closes("the generator", self.generator.close)
            closing.closes("the endpoint", self.endpoint.close)
            closing.closes("the environments", self.environments.close)


def _probe_text(renderer: Renderer, task: Task) -> list[int]:
    """The task's own words: a chat template's tokens are too predictable to tell weights apart."""
    words = " ".join(text_of(message["content"]) for message in task.prompt)
    tokens: list[int] = renderer.tokenizer.encode(words, add_special_tokens=False)[-64:]
    fallback: Message = {"role": "user", "content": words or "How much is seven times eight?"}
    return tokens if len(tokens) > 8 else renderer.render_prompt([fallback])


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
    from whet.checkpoint.store import CheckpointStore
    from whet.run.build import build_renderer, open_learners

    recipe, _ = await compute(decide, recipe)
    feed = RowsFeed(recipe, build_renderer(recipe))
    checkpoint = CheckpointStore(run / "checkpoints", recipe.checkpoints).load() if run is not None else None
    with Scratch("measure") as scratch:  # where learners would dump skipped steps
        async with open_learners(recipe, scratch) as learners:
            if checkpoint is not None:
                for role in recipe.algorithm.losses:
                    await learners[role].load(checkpoint.folder / role)
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
    measured, n = _loss_metrics(loss, scored, batch).result(), batch.group.unique().numel()
    values = {"evaluation/loss": measured["loss"], "evaluation/n": float(n)}
    if "preference/accuracy" in measured:
        accuracy = measured["preference/accuracy"]
        low, high = wilson(accuracy * n, n)
        values |= {"evaluation/accuracy": accuracy, "evaluation/low": low, "evaluation/high": high}
    if "preference/margin" in measured:
        values["evaluation/margin"] = measured["preference/margin"]
    return values


def _loss_metrics(loss: "Loss", scored: dict[str, Tensor], batch: Batch) -> Metrics:
    scored.setdefault("logprobs", torch.zeros(len(batch)))  # of a value head, or if the loss reads none
    return loss(ModelOutput(**scored), batch)[1]
