"""The loop, for every algorithm, in step or asynchronously.

source ──groups──► batch ──prepare──► minibatches ──update──► learners ──publish──► generator
  ▲                columns, advantages   weighed                          proven      │
  └──────────────────── episodes, as many steps ahead as permits allow ◄──────────────┘
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from whet.base.progress import PROGRESS
from whet.base.seeds import derive_seed
from whet.checkpoint.crash_points import crash_point
from whet.core.batch import Batch
from whet.core.types import Group
from whet.losses.off_policy import mismatch_metrics
from whet.processes.compute import compute

if TYPE_CHECKING:
    from whet.run.run import Run


async def train(run: "Run") -> None:
    """Run from ``run.start`` to ``run.recipe.steps``."""
    algorithm = run.recipe.algorithm
    async with run.source:
        await run.before_first_step()
        for step in range(run.start, run.recipe.steps):
            async with run.phase("generate", "generation"):
                groups = await run.source.next_groups()
            crash_point("step.generated")
            async with run.phase("learn", "learning", new_weights=True):
                batch = await compute(_batch, groups, run)
                run.metrics.merge(await algorithm.prepare(batch, groups, run.scorers))
                start = batch  # what is known of the policy at the start of the step; else, of the first minibatch
                minibatches = await compute(_minibatches, batch, run, step)
                for minibatch in PROGRESS.each(minibatches, "minibatches"):
                    for role, loss in algorithm.losses_at(step).items():
                        update = await run.learners[role].update(minibatch, loss)
                        run.metrics.merge(update.metrics, prefix="" if role == algorithm.main_role else f"{role}/")
                        if role == "policy" and start.old_logprobs is None:
                            start = replace(minibatch, old_logprobs=update.logprobs)
                if algorithm.on_policy:
                    batch.old_logprobs = start.old_logprobs  # for people to look at
                run.metrics.merge(await compute(mismatch_metrics, start))
            crash_point("step.updated")
            async with run.phase("publish"):
                await run.publish(step + 1)
            crash_point("step.published")
            await run.housekeeping(step + 1, groups, batch)


def _batch(groups: list[Group], run: "Run") -> Batch:
    return Batch.from_groups(groups, share_prompts=run.share_prompts, distribution=run.distribution)


def _minibatches(batch: Batch, run: "Run", step: int) -> list[Batch]:
    """Return the minibatches of all epochs, with their weights set."""
    algorithm, seed = run.recipe.algorithm, run.recipe.seed
    return [
        minibatch.weigh(algorithm.weighting, run.feed.longest)
        for epoch in range(algorithm.epochs)
        for minibatch, _ in batch.minibatches(algorithm.minibatches, derive_seed(seed, "minibatches", step, epoch))
    ]
