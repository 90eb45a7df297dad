"""The loop, for every algorithm, in step or asynchronously, and for one policy or several.

source ──groups──► batch ──prepare──► minibatches ──update──► policy ──publish──► generator
  ▲                columns, advantages   weighed                        proven       │
  └──────────────────── episodes, as many steps ahead as permits allow ◄─────────────┘
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from whet.core.types import Group
from whet.losses.off_policy import mismatch_metrics
from whet.processes.compute import compute
from whet.run.measures import profiled
from whet.run.policy import Policy
from whet.run.steps import Lesson

if TYPE_CHECKING:
    from whet.run.steps import Run

log = logging.getLogger(__name__)


async def train(run: "Run") -> None:
    """Run from ``run.start`` to ``run.recipe.steps``, or until evaluations no longer improve."""
    algorithm = run.recipe.algorithm
    async with run.source:
        await run.before_first_step()
        for step in range(run.start, run.recipe.steps):
            if run.patience.over:
                text = "the run ends at step %d of %d: %s. To train for longer: whet resume RUN evaluation.patience=0"
                log.warning(text, step, run.recipe.steps, run.patience)
                break
            async with run.phase("generate", "generation"):
                groups = await run.source.next_groups()
            profile = profiled(run.recipe.profile, run.learners[algorithm.main_role], run.folder, step + 1)
            async with run.phase("learn", "learning", new_weights=True), profile:
                lessons = [await learn(run, policy, share, step) for policy, share in run.shares(groups, step)]
            async with run.phase("publish"):
                await run.publish(step + 1)
            await run.housekeeping(step + 1, groups, lessons)


async def learn(run: "Run", policy: Policy, groups: list[Group], step: int) -> Lesson:
    """Update a policy on its share of a step's groups."""
    algorithm = run.recipe.algorithm
    batch = await run.prepare(policy, groups)
    start = batch  # with the old log-probs: from scoring or, when on policy, from the first update
    async for minibatch in run.minibatches(batch, step):
        for role, loss in algorithm.losses_at(step).items():
            update = await policy.update(minibatch, loss, role)
            prefix = "" if role == algorithm.main_role else f"{role}/"
            run.metrics.merge(update.metrics, prefix=f"{policy.prefix}{prefix}")
            if role == "policy" and start.old_logprobs is None:
                start = replace(minibatch, old_logprobs=update.logprobs)
    run.metrics.merge(await compute(mismatch_metrics, start), prefix=policy.prefix)
    return Lesson(policy, groups, start if algorithm.on_policy else batch)
