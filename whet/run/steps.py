"""A run in progress: what the loop works with, and the work between two steps (publish, log, evaluate, save)."""

import logging
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.base.errors import DataError
from whet.base.progress import PROGRESS
from whet.base.seeds import derive_seed
from whet.checkpoint.crash_points import crash_point
from whet.cluster.lease import Devices
from whet.core.batch import Batch
from whet.core.types import Group
from whet.data.source import Source
from whet.learner.base import Learner, Scorer
from whet.metrics import Metrics
from whet.metrics.clock import Clock, Pace, write_played
from whet.metrics.sinks import OpenSinks
from whet.processes.compute import compute
from whet.processes.user_code import place_of
from whet.run.feed import Feed
from whet.run.folder import Place
from whet.run.log import seconds_by_phase
from whet.run.measures import batch_values, idle_shares, split_generation, throughput
from whet.run.patience import Patience
from whet.run.policy import Policy
from whet.run.recipe import Recipe
from whet.run.saver import Saver
from whet.run.signals import Stopped, StopRequest
from whet.run.usage import Usage
from whet.tasks.base import called

log = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any]], object]  # a user's function of a step and its metrics, sync or async
_ACTIVITIES = {  # phases, in the words of messages
    "prepare": "preparing",
    "generate": "sampling",
    "score": "computing log-probs",
    "learn": "learning",
    "publish": "publishing the weights",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
}


@dataclass(slots=True)
class Restarts:
    """The number of times that this process restarted its run after it lost a worker or its engines."""

    count: int = 0
    begun: bool = False  # a run that could not begin is not restarted


@dataclass(slots=True, frozen=True)
class Lesson:
    """The groups that one policy learned from in a step."""

    policy: Policy
    groups: list[Group]  # of what its roles did
    batch: Batch  # of these groups


@dataclass(slots=True)
class Run:
    """Everything the loop works with."""

    recipe: Recipe
    place: Place
    start: int  # steps done so far
    feed: Feed
    policy: Policy
    scorers: Mapping[str, Scorer]  # the policy's learners, except for outputs that the feed has cached
    saver: Saver
    devices: Devices  # taken in turns where learners and generator share them
    sinks: OpenSinks
    usage: Usage
    patience: Patience
    further: Sequence[Policy] = ()  # the further policies that learn in this run
    clock: Clock = field(default_factory=Clock)
    pace: Pace = field(default_factory=Pace)
    metrics: Metrics = field(default_factory=Metrics)
    stop: StopRequest = field(default_factory=StopRequest)  # a signal's, looked at after each step
    restarts: Restarts = field(default_factory=Restarts)
    on_step: OnStep | None = None
    warned_of_best: bool = False
    warned_of_silence: set[str] = field(default_factory=set)  # names of policies

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def source(self) -> Source:
        """The source of the groups."""
        return self.feed.source

    @property
    def learners(self) -> Mapping[str, Learner]:
        return self.policy.learners

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies that learn, the main one first."""
        return (self.policy, *self.further)

    @asynccontextmanager
    async def phase(self, name: str, tenant: str | None = None, new_weights: bool = False) -> AsyncIterator[None]:
        """Time the block under ``name`` and show it as the current activity. Inside, a ``tenant`` has the devices, and
        may make ``new_weights``."""
        PROGRESS.begin(_ACTIVITIES[name])
        with self.clock.phase(name):
            if tenant is None:
                yield
            else:
                async with self.devices.acquire(tenant, new_weights):
                    yield

    async def before_first_step(self) -> None:
        """Prepare the feed, publish the learner's weights to the generator, and evaluate a fresh run."""
        async with self.phase("prepare"):
            self.scorers = await self.feed.prepare(self.learners, self.folder, range(self.start, self.recipe.steps))
        async with self.phase("publish"):
            for policy in self.policies:
                await policy.publish(self.start)
        if self.start == 0:
            self.patience.measure(0, await self._evaluate(0) or {})
        self.sinks.finish_step(self.start)
        PROGRESS.where = self._step(self.start + 1)
        self.restarts.begun = self.stop.begun = True
        if self.restarts.count:
            self.metrics.sum("cluster/restarts", self.restarts.count)
        self.clock.start()

    def _step(self, step: int) -> str:
        return f"step {min(step, self.recipe.steps)}/{self.recipe.steps}"

    def shares(self, groups: list[Group], step: int) -> list[tuple[Policy, list[Group]]]:
        """Return each policy with what its roles did in the groups. A policy that never replied, such as the second
        player of games that end at the first move, learns nothing in this step."""
        shares = [(policy, policy.share(groups)) for policy in self.policies]
        for policy, share in shares:
            if not share:
                self._note_silence(policy, step + 1)
        return [(policy, share) for policy, share in shares if share]

    def _note_silence(self, policy: Policy, step: int) -> None:
        """Count a step from which a policy learns nothing. Warn of its first one; the log has all."""
        self.metrics.sum(f"{policy.prefix}silent", 1)
        first = policy.name not in self.warned_of_silence
        self.warned_of_silence.add(policy.name)
        log.log(
            logging.WARNING if first else logging.INFO,
            "the policy %s replied in no episode of step %d, so it learns nothing from it%s",
            policy.name or "of model", step,
            f". Further such steps are counted ({policy.prefix}silent), but only written to log.txt" if first else "",
        )  # fmt: skip

    async def prepare(self, policy: Policy, groups: list[Group]) -> Batch:
        """Return the batch of a step with all columns that the losses of a policy read: log-probs, values, advantages.
        ``groups`` are the policy's share."""
        crash_point("step.generated")
        batch = await compute(policy.batch, groups)
        scorers = self.scorers if policy is self.policy else policy.learners
        with PROGRESS.within(_ACTIVITIES["score"]), self.clock.phase("score"):
            metrics = await called(self.recipe.algorithm.prepare, batch, groups, scorers)
            if not isinstance(metrics, Metrics):
                raise DataError(
                    f"{place_of(type(self.recipe.algorithm), 'prepare')} must return Metrics, as in `return await "
                    f"super().prepare(batch, groups, learners)`, not a {type(metrics).__name__}"
                )
            self.metrics.merge(metrics, prefix=policy.prefix)
        return batch

    async def minibatches(self, batch: Batch, step: int) -> AsyncIterator[Batch]:
        """Yield the minibatches of all epochs, each cut out when it is due, with their weights set."""
        for sequences in PROGRESS.each(await compute(self._parts, batch, step), "minibatches"):
            yield await compute(self._minibatch, batch, sequences)

    def _parts(self, batch: Batch, step: int) -> list[Tensor]:
        """Return the sequences of each minibatch."""
        algorithm, seed = self.recipe.algorithm, self.recipe.seed
        seeds = [derive_seed(seed, "minibatches", step, epoch) for epoch in range(algorithm.epochs)]
        return [part for each in seeds for part in batch.minibatches(algorithm.minibatches, each)]

    def _minibatch(self, batch: Batch, sequences: Tensor) -> Batch:
        part = batch if len(sequences) == batch.sequences else batch.select(sequences)[0]
        return part.weigh(self.recipe.algorithm.weighting, self.feed.longest)

    async def publish(self, version: int) -> None:
        """Weights first, then permits."""
        crash_point("step.updated")
        for policy in self.policies:
            self.metrics.merge(await policy.publish(version), prefix=policy.prefix)
        await self.source.published(version)
        crash_point("step.published")

    async def housekeeping(self, step: int, groups: list[Group], lessons: Sequence[Lesson]) -> None:
        """Log, evaluate and save, in this order, so that a step's metrics are on disk before its checkpoint. Then call
        ``on_step``. Raises ``Stopped`` afterwards if a signal asked for it."""
        self.saver.check()
        self.place.check()
        values, times = self._log(step, lessons)
        await compute(self.feed.record, self.folder, step, groups, lessons)
        crash_point("step.logged")
        measures = await self._evaluate(step) if self._evaluation_due(step) else {}
        stopping = self.stop.by if step < self.recipe.steps or measures is None else None
        measures = measures or {}
        await self._save_if_due(step, measures, stopping is not None)
        for name, seconds in self.clock.lap().items():  # the time since then belongs to this step, not to the next
            times[name] = times.get(name, 0.0) + seconds
        ended = {"run/steps": float(step)} if self.patience.over else {}
        self.sinks.write(step, times | self.usage.spend(times["time/step"]) | ended)
        self.sinks.finish_step(step)
        log.info("step %d of %d took %s", step, self.recipe.steps, seconds_by_phase(times))
        if self.on_step is not None:
            await self._call_on_step(self.on_step, step, values | measures | times)
        PROGRESS.where = self._step(step + 1)
        crash_point("step.done")
        if stopping is not None:
            raise Stopped(stopping, self.stop.why, self._saved(step))

    def _evaluation_due(self, step: int) -> bool:
        every = self.recipe.evaluation.every
        in_between = every > 0 and step % every == 0 and self.stop.by is None  # else there may be no time left
        return step == self.recipe.steps or in_between

    async def _save_if_due(self, step: int, measures: dict[str, float], stopping: bool) -> None:
        """Save if the recipe says so, if the weights are the best so far, and if the run ends. Then also wait for the
        checkpoint to be complete."""
        checkpoints, steps = self.recipe.checkpoints, self.recipe.steps
        is_best = step < steps and self.patience.measure(step, measures)
        ends_early = stopping or self.patience.over
        if ends_early or is_best or checkpoints.due(step, steps):
            async with self.phase("checkpoint", "learning"):
                state = {"step": step, "source": self.source.state(), "patience": self.patience.state()}
                await self.saver.save(step, state, measures.get(checkpoints.best_metric))
        if ends_early or step == steps:
            async with self.phase("checkpoint"):
                await self.saver.finish()

    def _saved(self, step: int) -> str:
        """Return what a user reads when a run stops after a step."""
        saved, folder = f"step {step} of {self.recipe.steps} is saved", shlex.quote(str(self.folder))
        if step == self.recipe.steps:
            return f"{saved}, without its evaluation. Evaluate with: whet eval {folder}"
        return f"{saved}. Resume with: whet resume {folder}"

    async def _call_on_step(self, on_step: OnStep, step: int, values: dict[str, object]) -> None:
        """Call the user's function. Its exception, with a note, ends the run."""
        try:
            await called(on_step, step, values)
        except Exception as error:
            error.add_note(f"on_step raised this after step {step}. Resume with: whet.resume({str(self.folder)!r})")
            raise

    def _log(self, step: int, lessons: Sequence[Lesson]) -> tuple[dict[str, object], dict[str, float]]:
        """Write the metrics of the step. Return them, and its seconds by phase so far."""
        tally, timing = self.source.tally()
        values: dict[str, Any] = tally.join(self.metrics.merge(self.saver.tally())).result()
        self.metrics = Metrics()
        lap = self.clock.lap()
        values |= idle_shares(lap, timing, self.devices.shared)
        split_generation(lap, timing)
        computed = sum(len(lesson.batch) for lesson in lessons)  # of rows, where nothing is sampled
        self.pace.add(lap["time/step"], values.get("answer/tokens", computed))
        for lesson in lessons:
            values |= {f"{lesson.policy.prefix}{name}": each for name, each in batch_values(lesson.batch).items()}
        values |= throughput(self.pace, self.recipe.steps - step)
        flops = sum(learner.flops for policy in self.policies for learner in policy.learners.values())
        values |= self.usage.step(lap, flops, values["time/tokens_per_second"])
        self.sinks.write(step, values | lap)
        write_played(self.folder, step, timing.played)
        self.feed.check(step, values)
        return values, lap

    async def _evaluate(self, step: int) -> dict[str, float] | None:
        """Return what was measured; None if a signal came, which may leave no time for sampling."""
        if not self.recipe.evaluation.enabled:
            return {}
        async with self.phase("evaluate"):
            evaluation = self.feed.evaluate(self.scorers)
            values = await (self.stop.unless_asked(evaluation) if self.feed.sampler is not None else evaluation)
        if values is None:
            log.warning("the evaluation after step %d is given up", step)
            return None
        if not values:
            return {}
        self.sinks.write(step, values, kind="evaluation")
        log.info("evaluation at step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        best = self.recipe.checkpoints.best_metric
        if best not in values and not self.warned_of_best:
            self.warned_of_best = True
            instead = "checkpoints.best_metric=evaluation/loss checkpoints.mode=min"
            advice = f"set {instead}" if "evaluation/loss" in values else f"measured are: {', '.join(values)}"
            log.warning("checkpoints.best_metric=%s is not measured, so no checkpoint is the best; %s", best, advice)
        return values
