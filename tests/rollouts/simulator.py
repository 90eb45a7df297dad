"""A run in virtual time: the real source, permits, ledger, sessions and router around engines, environments and a
learner that only wait. Thousands of steps take seconds, and a wait that nothing can end is an error at once."""

import asyncio
import contextlib
import json
import random
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from whet.base.errors import GeneratorError, ReplicaLostError
from whet.base.seeds import derive_seed
from whet.core.types import Group, Message, Task
from whet.engines.base import Completion, SamplingParams
from whet.engines.router import Router
from whet.metrics import Metrics
from whet.rollouts.config import RolloutConfig
from whet.rollouts.filters import Filter
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.ledger import MARKS
from whet.rollouts.sampling import Sampling
from whet.rollouts.source import RolloutSource
from whet.tasks.base import Observation, Step


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("every task waits, and nothing is in flight that could wake one")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next moment at which something happens."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


@dataclass(frozen=True)
class World:
    """Durations, in seconds, and failure rates."""

    learning: float = 1.0  # one step
    spread: float = 1.0  # of the logarithm of a reply's length
    tokens: int = 8  # median of a reply's length
    speed: float = 100.0  # tokens per second of one sequence
    slots: int = 8  # sequences that one engine decodes side by side
    engines: int = 2
    tool: float = 0.0  # mean of an environment's answer
    turns: int = 1
    flaky: float = 0.0  # share of attempts that fail
    dull: float = 0.0  # share of groups that the filter drops
    tasks: int = 7


class Engine:
    """Waits for as long as a reply would take; requests in flight survive pauses."""

    dtype: Any = None

    def __init__(self, world: World) -> None:
        self.world, self.version = world, 0
        self._slots = asyncio.Semaphore(world.slots)
        self._going, self._stopped = asyncio.Event(), asyncio.Event()
        self._going.set()
        self._dead = False

    def die(self) -> None:
        self._dead = True
        self._stopped.set()
        self._going.set()

    def _check(self) -> None:
        if self._dead:
            raise GeneratorError("the engine has died")

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        dice = random.Random(derive_seed(params.seed, "length"))
        length = max(
            1, min(params.max_new_tokens, round(self.world.tokens * dice.lognormvariate(0, self.world.spread)))
        )
        async with self._slots:
            await self._going.wait()
            self._check()
            left, oldest, loop = length / self.world.speed, self.version, asyncio.get_running_loop()
            while left > 0:
                started = loop.time()
                try:
                    async with asyncio.timeout(left):
                        await self._stopped.wait()
                    left -= loop.time() - started
                    await self._going.wait()
                    self._check()
                except TimeoutError:
                    left = 0
            return Completion([7] * length, [-1.0] * length, (oldest, self.version), "stop")

    async def pause(self) -> None:
        self._check()
        self._going.clear()
        self._stopped.set()

    async def resume(self, version: int) -> None:
        self.version = version
        await self.wake()

    async def sleep(self, new_weights: bool = False) -> None:
        await self.pause()

    async def wake(self, new_weights: bool = False) -> None:
        self._stopped.clear()
        self._going.set()

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list[Any]]:
        await self.pause()
        yield []
        await self.resume(version)

    def tally(self) -> Metrics:
        return Metrics()

    async def close(self) -> None:
        """Nothing is held."""


class Talk:
    """An environment that takes its time, and sometimes fails."""

    def __init__(self, world: World, task: Task, attempt: int) -> None:
        self.world, self.dice, self.turn = world, random.Random(derive_seed(task.uid, attempt)), 0

    async def start(self) -> Observation:
        return Observation([{"role": "user", "content": "?"}])

    async def step(self, reply: Message) -> Step:
        self.turn += 1
        if self.world.tool:
            await asyncio.sleep(self.dice.expovariate(1 / self.world.tool))
        if self.dice.random() < self.world.flaky:
            raise ConnectionError("away")
        return Step(self.dice.random(), self.turn >= self.world.turns, [{"role": "user", "content": "?"}])

    async def close(self) -> None:
        """Nothing is held."""


class Environments:
    restarts = 0

    def __init__(self, world: World) -> None:
        self.world, self.made = world, 0

    def program_for(self, task: Task) -> None:
        return None

    def make(self, task: Task) -> Talk:
        self.made += 1
        return Talk(self.world, task, self.made)

    async def score_group(self, task: Task, group: Group) -> None:
        """As they are."""

    def blocked_at(self) -> None:
        return None


class Renderer:
    """Messages are one token each."""

    stop_token_ids = (0,)
    images = None

    def longer_than(self, limit: int, messages: Sequence[Message], tools: Any = None) -> bool:
        return len(messages) > limit

    def render_prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [1] * len(messages)

    def render_next(self, history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [2] * len(messages)

    def parse_reply(self, tokens: Sequence[int], tools: Any = None) -> Message:
        return {"role": "assistant", "content": "!"}


class Dull(Filter):
    """Drops a share of the groups, by their names."""

    share: float

    def __call__(self, group: Group) -> Group | None:
        return None if random.Random(derive_seed(group.uid, "dull")).random() < self.share else group


class Simulation:
    """The loop of a run, with its checkpoint in memory. Keeps its own records."""

    def __init__(self, config: RolloutConfig, world: World, group_size: int = 2, seed: int = 0) -> None:
        self.config, self.world, self.group_size, self.seed = config, world, group_size, seed
        self.loop = VirtualLoop()
        self.version = 0
        self.trained: dict[int, list[str]] = {}  # version -> what was learned from to get there
        self.oldest = 0  # the most versions that anything learned from was behind
        self.most_versions_of_a_reply = 0  # by which its newest token is newer than its oldest
        self.finished_while_learning = 0  # groups
        self.made: list[Environments] = []
        self.source, self.router = self.loop.run_until_complete(self._open(None))
        self.saved = self._state()

    def run(self, steps: int) -> float:
        """Take steps; return the seconds."""
        begun = self.loop.time()
        for _ in range(steps):
            self.loop.run_until_complete(self._step())
        return self.loop.time() - begun

    def run_for(self, seconds: float) -> bool:
        """Begin a step, and stop wherever it is when the time is over. Return whether it was done."""
        try:
            self.loop.run_until_complete(asyncio.wait_for(self._step(), seconds))
        except TimeoutError:
            return False
        return True

    def rest(self, seconds: float) -> None:
        """The generator sleeps for a while."""

        async def go() -> None:
            await self.router.sleep()
            await asyncio.sleep(seconds)
            await self.router.wake()

        self.loop.run_until_complete(go())

    def lose_an_engine(self) -> None:
        """Lose a replica: the remaining ones continue, and another replaces it with the next weights."""
        cast(Engine, self.router.replicas[self.version % self.world.engines]).die()

    def save(self) -> None:
        self.saved = self._state()

    def kill(self, **changes: Any) -> None:
        """Discard everything that is not saved, and resume from there with other settings."""
        self.loop.run_until_complete(self._drop())
        self.config = RolloutConfig(**(self.config.model_dump() | changes))
        state, self.version = self.saved[0], self.saved[1]
        self.trained = {version: uids for version, uids in self.trained.items() if version <= self.version}
        self.source, self.router = self.loop.run_until_complete(self._open(json.loads(state)))

    def check(self) -> None:
        """No ticket is lost or counted twice, by the learner's own books; no permit either."""
        source = self.source
        learned = Counter(int(uid.split(":")[0]) for uids in self.trained.values() for uid in uids)
        assert not [ticket for ticket, times in learned.items() if times != 1]
        open_ = [ticket.number for ticket in source._tickets]
        assert len(set(open_)) == len(open_)
        marks = source.ledger.marks.decode()
        assert len(marks) == source._next_ticket
        for ticket, mark in enumerate(marks):
            homes = [ticket in learned, ticket in open_, mark in (MARKS["filtered"], MARKS["failed"])]
            assert homes.count(True) == 1, (ticket, mark, homes)
            assert (mark == MARKS["trained"]) == (ticket in learned)
        total = self.config.prompts_per_step * (self.config.max_staleness + 1)
        assert source.permits.available + len(open_) == total
        assert source.permits.available >= 0 or len(open_) > total, "only a larger budget's rest may exceed this one"

    def close(self) -> None:
        self.loop.run_until_complete(self._drop())
        self.loop.close()

    def _state(self) -> tuple[str, int]:
        return json.dumps(self.source.state()), self.version

    async def _open(self, state: dict[str, Any] | None) -> tuple[RolloutSource, Router[Any]]:
        engines = [Engine(self.world) for _ in range(self.world.engines)]
        router: Router[Any] = Router(engines, rebuild=lambda _: Engine(self.world), restarts=1000)
        self.made.append(Environments(self.world))
        sampling = Sampling(max_turns=self.world.turns, max_new_tokens=400)
        environments, renderer = cast(Any, self.made[-1]), cast(Any, Renderer())
        source = RolloutSource(
            self.config,
            [Task(f"task/{i}", []) for i in range(self.world.tasks)],
            GroupPlayer(self.config, sampling, environments, router, renderer, seed=self.seed),
            group_size=self.group_size,
            filters=[Dull(share=self.world.dull)],
            seed=self.seed,
        )
        if state is not None:
            source.load_state(state, self.version)
        await router.resume(self.version)
        return source, router

    async def _drop(self) -> None:
        await self.source.__aexit__()

    async def _step(self) -> None:
        groups = await self.source.next_groups()
        assert groups == sorted(groups, key=lambda group: group.uid), "within a step, tickets keep their order"
        for group in groups:
            versions = [span.versions for one in group.episodes for span in one.spans if span.versions]
            oldest = min(version for version, _ in versions)
            self.most_versions_of_a_reply = max(self.most_versions_of_a_reply, *(new - old for old, new in versions))
            self.oldest = max(self.oldest, self.version - oldest)
            assert self.version - oldest <= self.config.max_staleness, "learned from something stale"
        finished = sum(ticket.group is not None for ticket in self.source._tickets)
        await asyncio.sleep(self.world.learning)
        self.finished_while_learning += sum(ticket.group is not None for ticket in self.source._tickets) - finished
        self.version += 1
        while True:
            with contextlib.suppress(ReplicaLostError):
                async with self.router.refit(self.version):
                    break
        self.trained[self.version] = [group.uid for group in groups]
        await self.source.published(self.version)
