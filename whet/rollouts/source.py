"""Where the loop's groups come from in reinforcement learning: tasks are drawn, episodes run side by side, finished
groups are filtered and handed over, in the order of their tickets or as they get ready.

Who waits for what: ``next_groups`` waits for the oldest tickets. A ticket's task waits for free episode slots
(``concurrency``), then for the generator and the environment, with a deadline. ``published`` never waits. Tickets are
issued in one place (``_issue``), by permit, and consumed in order, so the result doesn't depend on which episode
finishes first.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from whet.base.closing import cancel_all
from whet.base.errors import ConfigError, DataError, DeadlineError
from whet.base.progress import PROGRESS
from whet.core.types import Episode, Group, Status, Task
from whet.data.order import TaskOrder
from whet.metrics import Metrics
from whet.metrics.clock import Timing
from whet.rollouts.config import RolloutConfig
from whet.rollouts.counts import count_group
from whet.rollouts.curriculum import Draws
from whet.rollouts.filters import Filter
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.ledger import UNKNOWN, Entry, Ledger, Outcome
from whet.rollouts.permits import Permits

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Ticket:
    number: int
    task: int  # index into the task set
    version: int  # weights when it was issued
    epoch: int | None = None  # None with a curriculum
    job: "asyncio.Task[None] | None" = None
    group: Group | None = None  # once it is sampled
    finished: int = -1  # how many were before it
    answers: int = 0  # episodes that have ended


class RolloutSource:
    """A source of groups sampled by the policy, ``group_size`` episodes each."""

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
        self.order = TaskOrder(len(self.tasks), seed)
        order = player.blend or config.curriculum
        self.curriculum: Draws | None = order.over(self.tasks, seed) if order else None
        self.permits = Permits(config.prompts_per_step, config.max_staleness)
        self.version = 0
        self.lost: list[Group] = []  # to failures, while the last step was sampled
        self.ledger = Ledger()
        self._owed: list[_Ticket] = []  # of the groups that were handed over last, with their permits
        self._next_ticket = 0
        self._tickets: deque[_Ticket] = deque()
        self._finish_order = itertools.count()
        self._metrics = Metrics()  # since the last call of ``tally``

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_all([ticket.job for ticket in self._tickets if ticket.job is not None])
        self._tickets.clear()

    async def next_groups(self) -> list[Group]:
        """One step's groups, in ticket order. Raises ``DataError`` when filters drop too many, ``WhetError`` when too
        many failed, ``DeadlineError`` when one took too long."""
        wanted = self.config.prompts_per_step
        most = wanted * self.config.max_sampling_rounds
        taken: list[tuple[_Ticket, Group]] = []
        self.lost, self._owed = [], []
        sampled = failed = 0
        self.player.timing.rest(False)
        self._issue()
        PROGRESS.count("answers", wanted * self.group_size, lambda: self._answers(len(taken), wanted))
        while len(taken) < wanted:
            if sampled == most:
                self._exhausted(len(taken), sampled, failed)
                break
            ticket, group = await self._next(wanted - len(taken))
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
                    taken.append((ticket, kept))
                    trained = sum(episode.trained_tokens for episode in kept.episodes)
                    self._sampled(trained=trained, filtered=_tokens(group) - trained)
                    continue
                self._end(ticket, group, "filtered", dropped_by)
            if self.curriculum is not None:
                self.curriculum.dropped(ticket.task)
            self.permits.give_back()
            if sampled + len(self._tickets) < most:
                self._issue()
        if self.config.partial:
            await self.player.generator.pause()  # until the next weights are published
            self.player.timing.rest(True)
        metrics = self._metrics.sum("groups/kept", len(taken)).sum("groups/dropped", sampled - failed - len(taken))
        metrics.sum("groups/failed", failed)
        if self.curriculum is not None:
            metrics.merge(self.curriculum.metrics())
        taken.sort(key=lambda one: one[0].number)
        self._owed = [ticket for ticket, _ in taken]
        return [group for _, group in taken]

    async def published(self, version: int) -> None:
        """New weights are in the generator: the trained step's permits come back."""
        self.version = version
        for ticket in self._owed:
            self.ledger.ended(self._entry(ticket, version, "trained"))
        self.permits.give_back(len(self._owed))
        self._owed = []
        if self.config.max_staleness and not self.config.partial:
            self._issue()  # run ahead; in step, sampling starts when the next groups are asked for

    def tally(self) -> tuple[Metrics, Timing]:
        """Metrics and timing since the last call."""
        timing = self.player.timing.lap()
        self._sampled(failed=timing.lost)
        metrics, self._metrics = self._metrics, Metrics()
        if timing.failures:
            metrics.sum("episodes/failed", timing.failures.total())
            for kind, count in timing.failures.items():
                metrics.sum(f"failures/{kind}", count)
        return metrics, timing

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs (JSON): the position in the data, and each ticket that is not trained yet,
        with its group if that is finished. Tickets under way are sampled again, under the same seeds."""
        pending = []
        for ticket in self._tickets:
            saved: dict[str, Any] = {"number": ticket.number, "task": ticket.task, "version": ticket.version}
            episodes = None if ticket.group is None else [asdict(episode) for episode in ticket.group.episodes]
            pending.append(saved | {"epoch": ticket.epoch, "episodes": episodes})
        name, position = self._position
        state = {name: position.state(), "next_ticket": self._next_ticket, "pending": pending}
        return state | {"ledger": self.ledger.state()}

    def load_state(self, state: dict[str, Any], version: int) -> None:
        """Go on from ``state`` under weights ``version``. What was under way is sampled by the next ``next_groups``."""
        name, position = self._position
        if name not in state:
            made = "with" if self.curriculum is None else "without"
            raise ConfigError(
                f"the checkpoint was made {made} rollouts.curriculum: resume with the same setting, or start anew"
            )
        position.load_state(state[name])
        self.version, self._next_ticket = version, state["next_ticket"]
        self.ledger.load_state(state.get("ledger", f"{self._next_ticket}{UNKNOWN}"))
        for saved in state["pending"]:
            ticket = _Ticket(saved["number"], saved["task"], saved["version"], saved.get("epoch"))
            if saved["episodes"] is not None:
                task = self.tasks[ticket.task]
                ticket.group = Group(self._uid(ticket), task, [Episode.from_json(e) for e in saved["episodes"]])
            self._tickets.append(ticket)
        self.permits.hold(len(state["pending"]))

    def _issue(self) -> None:
        """Start what lies waiting after a resume, then a new ticket for each permit."""
        for ticket in self._tickets:
            if ticket.job is None and ticket.group is None:
                ticket.version, ticket.answers = self.version, 0
                ticket.job = asyncio.create_task(self._run_group(ticket))
        while self.permits.take():
            ticket = _Ticket(self._next_ticket, self._draw(), self.version)
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
    def _position(self) -> tuple[str, TaskOrder | Draws]:
        """What says which task comes next, and its name in a checkpoint."""
        return ("order", self.order) if self.curriculum is None else ("curriculum", self.curriculum)

    async def _next(self, left: int) -> tuple[_Ticket, Group]:
        """Take out the ticket that is next, with its group, when that is finished; the step wants ``left`` more."""
        while True:
            ticket = await self._finished(self._may_come_next(left))
            group, ticket.group, ticket.job = ticket.group, None, None
            assert group is not None
            if self.version - ticket.version <= self.config.max_staleness:
                self._tickets.remove(ticket)
                return ticket, group
            self._sampled(stale=_tokens(group))  # from a run with a larger bound: the answers go, the prompt stays
            self._issue()

    def _may_come_next(self, left: int) -> list[_Ticket]:
        """The oldest, or with ``order = ready`` also each before which the older ones can let one more go."""
        if self.config.order == "oldest":
            return [self._tickets[0]]
        tickets = sorted(self._tickets, key=lambda ticket: (ticket.version, ticket.number))
        in_time, version = self.permits.in_time, self.version
        can_wait = (in_time(ticket.version, version, place - left + 1) for place, ticket in enumerate(tickets))
        return tickets[: 1 + len(list(itertools.takewhile(bool, can_wait)))]

    async def _finished(self, tickets: list[_Ticket]) -> _Ticket:
        """Return one of these that is finished, when there is one; of several, that which was first."""
        jobs = {ticket.job for ticket in tickets if ticket.job is not None}
        if not any(ticket.group for ticket in tickets):
            done, _ = await asyncio.wait(jobs, timeout=self.config.deadline, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
            if not done:
                raise self._too_late(tickets[0])
        return min((ticket for ticket in tickets if ticket.group), key=lambda ticket: ticket.finished)

    def _too_late(self, ticket: _Ticket) -> DeadlineError:
        place = self.player.environments.blocked_at()
        hint = "an environment or the generator hangs, or the deadline is too short"
        if place is not None:
            hint = f"an environment blocks at {place}, or the deadline is too short"
        return DeadlineError(
            f"group {self._uid(ticket)} did not finish within rollouts.deadline = {self.config.deadline:g} s; {hint}"
        )

    async def _run_group(self, ticket: _Ticket) -> None:
        def ended() -> None:
            ticket.answers += 1

        task = self.tasks[ticket.task]
        group = await self.player.play(task, self._uid(ticket), self.group_size, ended=ended)
        ticket.group, ticket.finished = group, next(self._finish_order)
        self.ledger.finished(ticket.number)

    def _end(self, ticket: _Ticket, group: Group, outcome: Outcome, why: str | None) -> None:
        """Drop what was sampled for the next step."""
        self.ledger.ended(self._entry(ticket, self.version + 1, outcome, why or ""))
        self._sampled(**{outcome: _tokens(group)})

    def _entry(self, ticket: _Ticket, step: int, outcome: Outcome, why: str = "") -> Entry:
        uid = self.tasks[ticket.task].uid
        return Entry(step, ticket.number, ticket.epoch, uid, ticket.version, outcome, why)

    def _sampled(self, trained: int = 0, **thrown_away: int) -> None:
        """Count sampled tokens by what became of them."""
        for name, tokens in (("trained", trained), *thrown_away.items()):
            self._metrics.sum(f"tokens/{name}", tokens).mean(
                "tokens/goodput", trained if name == "trained" else 0, tokens
            )

    def _answers(self, taken: int, wanted: int) -> int:
        return taken * self.group_size + sum(ticket.answers for ticket in list(self._tickets)[: wanted - taken])

    def _filters(self, task: Task) -> Sequence[Filter]:
        own = self.player.blend.of[task.environment].filters if self.player.blend else None
        return (*(self.filters if own is None else own), *self.pairing)

    def _filter(self, group: Group) -> tuple[Group | None, str]:
        """The group as it is learned from, or None and the filter that dropped it."""
        for keep in self._filters(group.task):
            kept = keep(group)
            if kept is None:
                return None, type(keep).__name__
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

    def _uid(self, ticket: _Ticket) -> str:
        return f"{ticket.number:07d}:{self.tasks[ticket.task].uid}"


def _tokens(group: Group) -> int:
    """How many tokens were sampled for it."""
    return sum(episode.trained_tokens for episode in group.episodes)
