"""The source of groups in reinforcement learning: tasks are drawn, episodes run concurrently, and finished groups are
filtered and returned, in the order of their tickets or as they become ready.

Who waits for whom, also when sampling runs ahead of training (``max_staleness`` above 0):

    who         consumes                    produces                    waits for                   unblocked by
    loop        the groups of a step        an update, a version        its step's groups           a finished group
    ticket      a permit and a task         a group, in a fixed order   all its episodes            its last episode
    permit      (counted, never waits)      the right to one ticket     -                           publish, or a drop
    episode     a slot of ``concurrency``   trajectories, a reward      a slot, engine, grader      a reply or a step
    engine      prompts                     replies, log-probs          the refit, if in progress   the refit's end
    refit       the policy's weights        the engine's new version    the update of the step      the update's end
    checkpoint  weights, the source state   a folder                    the step's publish          the loop, at its end

The loop waits for a group at most ``deadline`` seconds without progress, in which no episode gets a reply or ends, and
an episode at most ``episode_deadline`` for its engine and environment. During a refit, requests in flight are paused
and then continue under the new version. A checkpoint saves the tickets in flight as numbers and seeds; their episodes
are sampled again after a resume. ``published`` never waits.
Tickets are issued only in ``_issue``, one per permit, and by default consumed in order, so the result doesn't depend on
which episode finishes first.
"""

import asyncio
import itertools
import logging
import reprlib
from collections import deque
from collections.abc import Sequence
from typing import Self

from whet.base.closing import cancel_all
from whet.base.errors import ConfigError, DataError, DeadlineError
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.chat.renderer import check_images
from whet.core.types import Group, Status, Task
from whet.data.order import TaskOrder
from whet.engines.base import pausable
from whet.metrics import Metrics
from whet.metrics.clock import Timing
from whet.processes.user_code import place_of
from whet.rollouts.config import RolloutConfig
from whet.rollouts.curriculum import TaskSampler
from whet.rollouts.filters import Filter
from whet.rollouts.group_metrics import count_group
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.ledger import UNKNOWN, Entry, Ledger, Outcome
from whet.rollouts.tickets import Permits, Ticket, may_come_next
from whet.tasks.base import checked_score

log = logging.getLogger(__name__)


class RolloutSource:
    """A source of groups that the policy samples, with ``group_size`` episodes each."""

    def __init__(
        self,
        config: RolloutConfig,
        tasks: Sequence[Task],
        player: GroupPlayer,
        *,
        group_size: int,
        filters: Sequence[Filter] = (),
        pairing: Sequence[Filter] = (),
        seed: int = 0,
    ) -> None:
        self.config, self.tasks, self.player = config, tasks, player
        self.group_size, self.filters, self.pairing, self.seed = group_size, tuple(filters), tuple(pairing), seed
        if not tasks:
            raise DataError("the task set has no training tasks")
        for task in tasks if player.renderer.images is None else ():
            check_images(player.renderer, task.prompt, f" of task {task.uid}")
        self.order = TaskOrder(len(self.tasks), seed)
        curriculum = player.blend or config.curriculum
        self.curriculum: TaskSampler | None = curriculum.sampler_for(self.tasks, seed) if curriculum else None
        self.permits = Permits(config.prompts_per_step, config.max_staleness)
        self.version = 0
        self.lost: list[Group] = []  # groups lost to failures while the last step was sampled
        self.ledger = Ledger()
        self._awaiting_publish: list[Ticket] = []  # trained this step; their permits return when weights are published
        self._next_ticket = 0
        self._tickets: deque[Ticket] = deque()
        self._finish_order = itertools.count()
        self._metrics = Metrics()  # since the last call of ``tally``
        self._restarts = 0  # of environment workers, until that call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_all([ticket.job for ticket in self._tickets if ticket.job is not None])
        self._tickets.clear()

    async def next_groups(self) -> list[Group]:
        """Return one step's groups, in ticket order. Raises ``DataError`` if filters drop too many groups,
        ``WhetError`` if too many failed, ``DeadlineError`` without progress."""
        needed = self.config.prompts_per_step
        most = needed * self.config.max_sampling_rounds
        accepted: list[tuple[Ticket, Group]] = []
        self.lost, self._awaiting_publish = [], []
        sampled = failed = 0
        self.player.timing.rest(False)
        self._issue()
        PROGRESS.count("answers", needed * self.group_size, lambda: self._answers(len(accepted), needed))
        while len(accepted) < needed:
            if sampled == most:
                self._exhausted(len(accepted), sampled, failed)
                break
            ticket, group = await self._next(needed - len(accepted))
            sampled += 1
            lost = any(episode.status is Status.FAILED for episode in group.episodes)
            if self.curriculum is not None:
                self.curriculum.measured(ticket.task, None if lost else group, self.version)
            if lost:
                failed += 1
                self.lost.append(group)
                failure = next(episode for episode in group.episodes if episode.status is Status.FAILED)
                self._end(ticket, group, "failed", failure.error)
                self.player.failures.check_lost(group, failed, self.config)
            else:
                count_group(self._metrics, group, self.player.sampling_of(group.task).mode, self.version)
                kept, dropped_by = self._filter(group)
                if kept is not None:
                    accepted.append((ticket, kept))
                    trained = kept.trained_tokens
                    self._sampled(trained=trained, filtered=group.trained_tokens - trained)
                    continue
                self._end(ticket, group, "filtered", dropped_by)
            if self.curriculum is not None:
                self.curriculum.dropped(ticket.task)
            self.permits.give_back()
            if sampled + len(self._tickets) < most:
                self._issue()
        if self.config.partial:
            await pausable(self.player.generator, "rollouts.partial").pause()  # until the next weights are published
            self.player.timing.rest(True)
        metrics = self._metrics.sum("groups/kept", len(accepted))
        metrics.sum("groups/dropped", sampled - failed - len(accepted)).sum("groups/failed", failed)
        if self.curriculum is not None:
            metrics.merge(self.curriculum.metrics())
        accepted.sort(key=lambda pair: pair[0].number)
        self._awaiting_publish = [ticket for ticket, _ in accepted]
        return [group for _, group in accepted]

    async def published(self, version: int) -> None:
        """Record that the generator has new weights; the permits of the trained step return."""
        self.version = version
        for ticket in self._awaiting_publish:
            self.ledger.ended(self._entry(ticket, version, "trained"))
        self.permits.give_back(len(self._awaiting_publish))
        self._awaiting_publish = []
        if self.config.max_staleness and not self.config.partial:
            self._issue()  # run ahead; synchronous sampling starts in ``next_groups``

    def tally(self) -> tuple[Metrics, Timing]:
        """Return the metrics and timing since the last call."""
        timing = self.player.timing.lap()
        self._sampled(failed=timing.lost)
        metrics, self._metrics = self._metrics, Metrics()
        if timing.failures:
            metrics.sum("episodes/failed", timing.failures.total())
            for kind, count in timing.failures.items():
                metrics.sum(f"failures/{kind}", count)
        restarts = self.player.environments.restarts
        if restarts > self._restarts:
            metrics.sum("environment_workers/restarts", restarts - self._restarts)
            self._restarts = restarts
        return metrics, timing

    def state(self) -> JsonObject:
        """Return all that a resumed run needs (JSON): the position in the data, and each ticket that is not trained
        yet, with its group if that is finished. Tickets in flight are sampled again, with the same seeds."""
        name, position = self._position
        pending = [ticket.state() for ticket in self._tickets]
        state = {name: position.state(), "next_ticket": self._next_ticket, "pending": pending}
        return state | {"ledger": self.ledger.state()}

    def load_state(self, state: JsonObject, version: int) -> None:
        """Continue from ``state`` under weights ``version``. The next ``next_groups`` samples the tickets that were in
        flight."""
        name, position = self._position
        if "next_ticket" not in state:
            raise ConfigError(
                "the checkpoint is of a run that sampled no answers, so it has no position in the tasks; resume with "
                "the same data and rollouts.replay, or start a new run"
            )
        if name not in state:
            made = "with" if self.curriculum is None else "without"
            raise ConfigError(
                f"the checkpoint was made {made} rollouts.curriculum; resume with the same setting, or start a new run"
            )
        position.load_state(state[name])
        self.version, self._next_ticket = version, state["next_ticket"]
        self.ledger.load_state(state.get("ledger", f"{self._next_ticket}{UNKNOWN}"))
        for saved in state["pending"]:
            ticket = Ticket.from_state(saved, self.tasks[saved["task"]])
            episodes = ticket.group.episodes if ticket.group is not None else []
            if len(episodes) != self.group_size and all(each.status is not Status.FAILED for each in episodes):
                ticket.group = None  # algorithm.group_size was changed: sample the prompt again
            self._tickets.append(ticket)
        self.permits.hold(len(state["pending"]))

    def _issue(self) -> None:
        """Start the tickets that a resumed run has waiting, then a new ticket for each permit."""
        for ticket in self._tickets:
            if ticket.job is None and ticket.group is None:
                ticket.version, ticket.answers = self.version, 0
                ticket.job = asyncio.create_task(self._run_group(ticket))
        while self.permits.take():
            ticket = Ticket(self._next_ticket, self._draw(), self.version)
            ticket.epoch = self.order.epoch if self.curriculum is None else None
            self.ledger.dispatched(ticket.number)
            self._next_ticket += 1
            ticket.job = asyncio.create_task(self._run_group(ticket))
            self._tickets.append(ticket)

    def _draw(self) -> int:
        if self.curriculum is None:
            return self.order.next()
        return self.curriculum.draw(self.version, {ticket.task for ticket in self._tickets})

    @property
    def _position(self) -> tuple[str, TaskOrder | TaskSampler]:
        """The object that draws tasks, and its name in a checkpoint."""
        return ("order", self.order) if self.curriculum is None else ("curriculum", self.curriculum)

    async def _next(self, left: int) -> tuple[Ticket, Group]:
        """Remove and return the next ticket, with its group, once it is finished; the step needs ``left`` more
        groups."""
        while True:
            in_order = self.config.order == "oldest"
            tickets = [self._tickets[0]] if in_order else may_come_next(self._tickets, self.permits, self.version, left)
            ticket = await self._finished(tickets)
            group, ticket.group, ticket.job = ticket.group, None, None
            assert group is not None
            if self.version - ticket.version <= self.config.max_staleness:
                self._tickets.remove(ticket)
                return ticket, group
            self._sampled(stale=group.trained_tokens)  # the checkpoint had a larger bound: sample the prompt again
            self._issue()

    async def _finished(self, tickets: list[Ticket]) -> Ticket:
        """Wait until one of the tickets is finished, and return the one that finished first."""
        jobs = {ticket.job for ticket in tickets if ticket.job is not None}
        while not any(ticket.group for ticket in tickets):
            before = self.player.timing.progress
            done, _ = await asyncio.wait(jobs, timeout=self.config.deadline, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
            if not done and self.player.timing.progress == before:
                raise self._too_late(tickets[0])
        return min((ticket for ticket in tickets if ticket.group), key=lambda ticket: ticket.finished)

    def _too_late(self, ticket: Ticket) -> DeadlineError:
        place, name = self.player.environments.blocked_at(), ticket.uid(self.tasks[ticket.task])
        hint = "an environment or the generator hangs, or the deadline is too short"
        if place is not None:
            hint = f"an environment blocks at {place}, or the deadline is too short"
        return DeadlineError(
            f"group {name} is not finished, and no episode had a reply or ended within rollouts.deadline = "
            f"{self.config.deadline:g} s; {hint}"
        )

    async def _run_group(self, ticket: Ticket) -> None:
        def ended() -> None:
            ticket.answers += 1

        task = self.tasks[ticket.task]
        group = await self.player.play(task, ticket.uid(task), self.group_size, ended=ended)
        ticket.group, ticket.finished = group, next(self._finish_order)
        self.ledger.finished(ticket.number)

    def _end(self, ticket: Ticket, group: Group, outcome: Outcome, why: str | None) -> None:
        """Record that a group sampled for the next step was dropped."""
        self.ledger.ended(self._entry(ticket, self.version + 1, outcome, why or ""))
        self._sampled(**{outcome: group.trained_tokens})

    def _entry(self, ticket: Ticket, step: int, outcome: Outcome, why: str = "") -> Entry:
        uid = self.tasks[ticket.task].uid
        return Entry(step, ticket.number, ticket.epoch, uid, ticket.version, outcome, why)

    def _sampled(self, trained: int = 0, **discarded: int) -> None:
        """Count sampled tokens by their use."""
        for name, tokens in (("trained", trained), *discarded.items()):
            self._metrics.sum(f"tokens/{name}", tokens).mean(
                "tokens/goodput", trained if name == "trained" else 0, tokens
            )

    def _answers(self, accepted: int, needed: int) -> int:
        return accepted * self.group_size + sum(ticket.answers for ticket in list(self._tickets)[: needed - accepted])

    def _filters(self, task: Task) -> Sequence[Filter]:
        filters = self.player.blend.of[task.environment].filters if self.player.blend else None
        return (*(self.filters if filters is None else filters), *self.pairing)

    def _filter(self, group: Group) -> tuple[Group | None, str]:
        """Return the filtered group, or None and the name of the filter that dropped it."""
        for keep in self._filters(group.task):
            kept: object = keep(group)
            if kept is None:
                return None, type(keep).__name__
            where = place_of(type(keep), "__call__")
            if not isinstance(kept, Group):
                raise DataError(f"{where} must return the group, or None to drop it, not {reprlib.repr(kept)}")
            if not kept.episodes:
                raise DataError(f"{where} returns a group without episodes; it must return None to drop the group")
            for episode in kept.episodes:
                episode.reward = checked_score("reward", episode.reward, f"of {group.uid} after {where}")
            group = kept
        return group, ""

    def _exhausted(self, kept: int, sampled: int, failed: int) -> None:
        if not kept or self.config.when_exhausted == "error":
            raise DataError(
                f"of {sampled} groups sampled for this step {failed} failed and only {kept} passed the filters "
                f"({self.config.prompts_per_step} are needed); the tasks are too easy or too hard for this model. "
                "Choose other tasks, a larger group, more rollouts.max_sampling_rounds, or "
                "rollouts.when_exhausted=smaller_step"
            )
