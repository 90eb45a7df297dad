"""What a run learns from and is measured on: episodes that its own policy plays, or rows of a data set. A feed has a
source of groups, takes each new version of the weights, and evaluates. The loop does not know which one it has."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from whet.algorithms.annotate import annotate
from whet.batch import Batch, ModelOutput
from whet.build import build_generator, build_sync
from whet.data.renderer import Renderer
from whet.data.source import DatasetSource, Source
from whet.evaluate import evaluate_tasks
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.metrics.rollout_file import write_rollouts
from whet.metrics.statistics import wilson
from whet.rollouts.recorder import records
from whet.rollouts.source import RolloutSource
from whet.types import Distribution, Group, Message, Task

if TYPE_CHECKING:
    from whet.losses.base import Loss
    from whet.recipe import Recipe

log = logging.getLogger(__name__)


class Feed(Protocol):
    """One run's supply of groups."""

    @property
    def source(self) -> Source: ...

    @property
    def distribution(self) -> Distribution:
        """What log-probs are taken under."""
        ...

    async def publish(self, learners: Mapping[str, Learner], version: int) -> Metrics:
        """Whoever samples gets the weights."""
        ...

    async def evaluate(self, learners: Mapping[str, Learner]) -> dict[str, float]:
        """One evaluation line; empty where there is nothing to measure on."""
        ...

    def record(self, folder: Path, step: int, groups: list[Group], batch: Batch) -> None:
        """Write what was sampled into the run folder."""
        ...

    async def close(self) -> None: ...


def build_feed(recipe: "Recipe", renderer: Renderer) -> Feed:
    """The feed that the recipe's algorithm learns from."""
    return SampledFeed(recipe, renderer) if recipe.algorithm.samples_per_task else RowsFeed(recipe, renderer)


class SampledFeed:
    """Episodes of the policy over a task set, through a generator."""

    def __init__(self, recipe: "Recipe", renderer: Renderer) -> None:
        self.recipe, self.renderer = recipe, renderer
        self.distribution = recipe.sampling.distribution
        self.generator = build_generator(recipe, renderer)
        self.source = RolloutSource(
            recipe.rollouts,
            recipe.sampling,
            recipe.taskset,
            self.generator,
            renderer,
            group_size=recipe.algorithm.samples_per_task,
            filters=recipe.algorithm.group_filters,
            seed=recipe.seed,
        )
        self.sync = build_sync(recipe, self.generator, _probe_text(renderer, self.source.tasks[0]))

    async def publish(self, learners: Mapping[str, Learner], version: int) -> Metrics:
        return await self.sync.publish(learners["policy"], self.generator, version)

    async def evaluate(self, learners: Mapping[str, Learner]) -> dict[str, float]:
        config, taskset = self.recipe.evaluation, self.recipe.taskset
        report = await evaluate_tasks(
            taskset.tasks(config.split)[: config.limit],
            taskset,
            self.generator,
            self.renderer,
            config.sampling(self.recipe.sampling),
            config,
            seed=self.recipe.seed,
        )
        return report.metrics()

    def record(self, folder: Path, step: int, groups: list[Group], batch: Batch) -> None:
        every = self.recipe.rollouts.record_every
        if every and step % every == 0:
            write_rollouts(folder, step, records(step, groups, batch, self.renderer))

    async def close(self) -> None:
        await self.generator.close()


def _probe_text(renderer: Renderer, task: Task) -> list[int]:
    """The task's own words: a chat template's tokens are too predictable to tell weights apart."""
    words = " ".join(message["content"] for message in task.prompt)
    tokens: list[int] = renderer.tokenizer.encode(words, add_special_tokens=False)[-64:]
    fallback: Message = {"role": "user", "content": words or "How much is seven times eight?"}
    return tokens if len(tokens) > 8 else renderer.render_prompt([fallback])


class RowsFeed:
    """Rows of a data set. Nothing is sampled, so there is no generator and nothing to publish to."""

    def __init__(self, recipe: "Recipe", renderer: Renderer) -> None:
        self.recipe, self.renderer = recipe, renderer
        self.distribution = Distribution()
        self.source = DatasetSource(recipe.rows.groups(renderer), recipe.rows.batch_size, recipe.seed)
        self._held_out: Batch | None = None

    async def publish(self, learners: Mapping[str, Learner], version: int) -> Metrics:
        return Metrics()

    async def evaluate(self, learners: Mapping[str, Learner]) -> dict[str, float]:
        """The loss on the held-out rows and, for pairs, the share in which the chosen answer wins."""
        algorithm = self.recipe.algorithm
        learner = learners[algorithm.main_role]
        if self._held_out is None:
            groups = self._groups()
            if not groups:
                log.warning("no row is held out, so nothing is evaluated; give data.test_path, or more rows")
                return {}
            batch = Batch.from_groups(groups, share_prompts=learner.describe().get("forest", True))
            batch = await annotate(batch, algorithm, learners)
            self._held_out = algorithm.weigh(batch, self.recipe.sampling.max_new_tokens)
        return await measure(self._held_out, algorithm.losses[algorithm.main_role], learner)

    def _groups(self) -> list[Group]:
        config = self.recipe.evaluation
        rows = self.recipe.rows.groups(self.renderer, config.split)
        groups = (rows[index] for index in range(len(rows)))
        return [group for group in groups if not isinstance(group, str)][: config.limit]

    def record(self, folder: Path, step: int, groups: list[Group], batch: Batch) -> None:
        """Rows are in their file already."""

    async def close(self) -> None:
        """Nothing is held."""


async def measure(batch: Batch, loss: "Loss", learner: Learner) -> dict[str, float]:
    """A loss over a weighed batch, without learning: ``evaluation/loss`` over ``evaluation/n`` rows; of pairs also
    ``evaluation/accuracy``, with Wilson's interval (``low``, ``high``), and ``evaluation/margin``."""
    own = {"values"} if "values" in loss.needs else {"logprobs"} | (set(loss.needs) & {"entropy", "topk"})
    said = await learner.score(batch, own)
    if "logprobs" not in said:
        said["logprobs"] = said["values"].new_zeros(len(batch))
    _, metrics = loss(ModelOutput(**said), batch)
    found, n = metrics.result(), len(batch.group_uids)
    values = {"evaluation/loss": found["loss"], "evaluation/n": float(n)}
    if "preference/accuracy" in found:
        accuracy = found["preference/accuracy"]
        low, high = wilson(accuracy * n, n)
        values |= {"evaluation/accuracy": accuracy, "evaluation/low": low, "evaluation/high": high}
        values["evaluation/margin"] = found["preference/margin"]
    return values
