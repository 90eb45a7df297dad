"""Replicas that die or freeze: the others go on, another is started in their place, and it serves only once it has
weights."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from whet.base.errors import DeadlineError, GeneratorError, RefitError, ReplicaLostError
from whet.engines.base import Completion, SamplingParams, prompt_metrics
from whet.engines.router import Router
from whet.metrics import Metrics

PARAMS = SamplingParams(4)
DEADLINE = 0.02


class Fake:
    """A replica that answers with its number of requests in flight; alive, dead or frozen."""

    def __init__(self, seconds: float = 0.001, *, version: int | None = 0, starts: bool = True) -> None:
        self.seconds, self.version, self.starts = seconds, version, starts
        self.state, self.changed = "alive", asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()
        self.asked: list[tuple[tuple[int, ...], str]] = []
        self.closed = False

    def become(self, state: str) -> None:
        self.state = state
        self.changed.set()

    async def _work(self, seconds: float) -> None:
        if self.state == "alive":
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), seconds)
        if self.state == "frozen":
            await asyncio.sleep(DEADLINE)
            raise DeadlineError("said nothing")
        if self.state == "dead" or not self.starts:
            raise GeneratorError("died")

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        assert self.version is not None, "sampled from without weights"
        self.asked.append((tuple(prompt), session))
        while not self.going.is_set() and self.state == "alive":
            await asyncio.sleep(0.001)
        assert self.version is not None or self.state != "alive", "sampled from without weights"
        await self._work(self.seconds)
        return Completion([1], [0.0], (self.version, self.version), "stop")

    async def pause(self) -> None:
        await self._work(0.0005)
        self.going.clear()

    async def resume(self, version: int) -> None:
        await self._work(0.0005)
        self.version = version
        self.going.set()

    async def sleep(self, new_weights: bool = False) -> None:
        await self.pause()

    async def wake(self, new_weights: bool = False) -> None:
        self.going.set()

    async def take(self) -> None:
        await self._work(0.001)

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["Fake"]]:
        await self.pause()
        self.version = None
        yield [self]
        await self.resume(version)

    def tally(self) -> Metrics:
        return prompt_metrics(1, 0)

    async def close(self) -> None:
        self.closed = True
        await asyncio.sleep(0)


class Fleet:
    """A router over fakes, and all fakes that were ever made."""

    def __init__(self, count: int, restarts: int = 100, **settings: Any) -> None:
        self.made = [Fake(**settings) for _ in range(count)]
        self.starts = True
        self.router: Any = Router(list(self.made), 8.0, self._rebuild, restarts)

    def _rebuild(self, number: int) -> Any:
        self.made.append(Fake(version=None, starts=self.starts))
        return self.made[-1]

    async def publish(self, version: int) -> None:
        while True:
            try:
                async with self.router.refit(version) as models:
                    await asyncio.gather(*(model.take() for model in models))
                return
            except ReplicaLostError:
                pass

    async def refit_during_which(self, happens: Callable[[], None]) -> None:
        async with self.router.refit(1) as models:
            happens()
            await asyncio.gather(*(model.take() for model in models))

    async def restarted(self) -> None:
        while self.router._restarting:
            await asyncio.sleep(0.001)


def differ() -> None:
    raise RefitError("the weights differ")


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_what_a_lost_replica_had_under_way_is_answered_by_the_others(how: str) -> None:
    async def body() -> None:
        fleet = Fleet(2, seconds=0.05)
        router, (lost, other) = fleet.router, fleet.made
        tasks = [asyncio.create_task(router.sample([i], PARAMS, f"s{i}")) for i in range(10)]
        await asyncio.sleep(0.01)
        assert router.placement.outstanding == [25, 25]  # a token of prompt and four of limit
        lost.become(how)
        assert all(c.versions == (0, 0) for c in await asyncio.gather(*tasks))
        assert len(other.asked) == 10
        assert router.placement.outstanding == [0, 0]
        assert router.serving == {1}
        for i in range(0, 10, 2):  # sessions of the lost one have another from now on
            await router.sample([i, 1], PARAMS, f"s{i}")
        assert len(lost.asked) == 5
        await router.close()
        assert all(one.closed for one in fleet.made)

    in_loop(body)


def test_one_that_was_started_again_serves_after_a_refit_that_succeeded_and_not_before() -> None:
    async def body() -> None:
        fleet = Fleet(2)
        router = fleet.router
        fleet.made[0].become("dead")
        await asyncio.gather(*(router.sample([i], PARAMS, "") for i in range(4)))
        await fleet.restarted()
        assert fleet.made[0].closed
        assert (router.serving, router.ready) == ({1}, {0})
        with pytest.raises(RefitError):
            await fleet.refit_during_which(differ)
        assert (router.serving, router.ready) == ({1}, {0})
        await fleet.publish(2)
        assert (router.serving, router.ready) == ({0, 1}, set())
        out = await asyncio.gather(*(router.sample([i], PARAMS, "") for i in range(4)))
        assert [c.versions for c in out] == [(2, 2)] * 4
        assert len(fleet.made[2].asked) == 2
        told = router.tally().result()
        assert (told["generator/lost"], told["generator/restarts"]) == (1, 1)
        assert "generator/lost" not in router.tally().result()
        await router.close()

    in_loop(body)


def test_the_last_replica_is_not_replaced_and_its_error_is_the_callers() -> None:
    async def body() -> None:
        fleet = Fleet(2)
        for fake in fleet.made:
            fake.become("dead")
        out = await asyncio.gather(*(fleet.router.sample([i], PARAMS, "") for i in range(6)), return_exceptions=True)
        assert all(isinstance(error, GeneratorError) and "of 2: died" in str(error) for error in out)
        assert fleet.router.placement.outstanding == [0, 0]
        await fleet.router.close()

    in_loop(body)


def test_restarts_are_bounded_also_where_engines_do_not_start() -> None:
    async def body() -> None:
        fleet = Fleet(2, restarts=3)
        fleet.starts = False
        fleet.made[1].become("dead")
        await asyncio.gather(*(fleet.router.sample([i], PARAMS, "") for i in range(4)))
        await fleet.restarted()
        assert len(fleet.made) == 2 + 3
        assert all(fake.closed for fake in fleet.made[1:])
        await fleet.publish(1)
        assert fleet.router.serving == {0}
        assert (await fleet.router.sample([1], PARAMS, "")).versions == (1, 1)
        await fleet.router.close()

    in_loop(body)


def test_a_replica_that_has_answered_again_may_be_restarted_as_often_again() -> None:
    async def body() -> None:
        fleet = Fleet(2, restarts=1)
        for version in range(1, 6):
            fleet.router.replicas[0].become("dead")
            await asyncio.gather(*(fleet.router.sample([i], PARAMS, "") for i in range(4)))
            await fleet.restarted()
            await fleet.publish(version)
            out = await asyncio.gather(*(fleet.router.sample([i], PARAMS, "") for i in range(4)))
            assert [c.versions for c in out] == [(version, version)] * 4
            assert fleet.router.serving == {0, 1}
        assert len(fleet.made) == 2 + 5
        await fleet.router.close()

    in_loop(body)


@pytest.mark.parametrize("how", ["dead", "frozen"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_replica_that_is_lost_in_a_refit_is_left_out_of_it(how: str, when: str) -> None:
    async def body() -> None:
        fleet = Fleet(3, restarts=0)
        if when == "before":
            fleet.made[2].become(how)
            await fleet.publish(5)
        else:
            with pytest.raises(ReplicaLostError, match="during a refit, "):
                await fleet.refit_during_which(lambda: fleet.made[2].become(how))
            await fleet.publish(5)
        assert fleet.router.serving == {0, 1}
        out = await asyncio.gather(*(fleet.router.sample([i], PARAMS, "") for i in range(4)))
        assert {c.versions for c in out} == {(5, 5)}
        await fleet.router.close()

    in_loop(body)


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_the_only_serving_replica_may_be_lost_while_another_is_taken_in(how: str) -> None:
    async def body() -> None:
        fleet = Fleet(2, restarts=1)
        router = fleet.router
        fleet.made[0].become("dead")
        await asyncio.gather(*(router.sample([i], PARAMS, "") for i in range(4)))
        await fleet.restarted()
        fleet.starts = False
        waiting: list[asyncio.Task[Completion]] = []

        def lose() -> None:
            waiting.append(asyncio.create_task(router.sample([1], PARAMS, "")))
            fleet.made[1].become(how)

        with pytest.raises(ReplicaLostError, match="during a refit, "):
            await fleet.refit_during_which(lose)
        await fleet.publish(2)
        assert router.serving == {0}
        assert (await waiting[0]).versions == (2, 2)
        fleet.made[2].become("dead")
        with pytest.raises(GeneratorError, match="replica 1 of 2: died"):
            await fleet.publish(3)
        await router.close()

    in_loop(body)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_is_answered_once_whatever_dies_when(seed: int) -> None:
    """Requests, refits, deaths and pauses at random times; one replica is always spared."""
    draw = random.Random(seed)

    async def body() -> None:
        fleet = Fleet(3)
        router, done, version = fleet.router, asyncio.Event(), 0

        async def ask(number: int) -> Completion:
            await asyncio.sleep(draw.random() * 0.06)
            return await router.sample([number % 7], PARAMS, f"s{number % 11}")

        async def kill() -> None:
            while not done.is_set():
                await asyncio.sleep(draw.random() * 0.02)
                alive = [n for n in router.serving if router.replicas[n].state == "alive"]
                if len(alive) > 1:
                    router.replicas[draw.choice(alive)].become(draw.choice(["dead", "frozen"]))

        async def refit() -> None:
            nonlocal version
            while not done.is_set():
                await asyncio.sleep(draw.random() * 0.02)
                version += 1
                await fleet.publish(version)

        others = [asyncio.create_task(work()) for work in (kill, refit)]
        asked = [asyncio.create_task(ask(i)) for i in range(50)]
        given_up = draw.sample(asked, 5)
        await asyncio.sleep(0.02)
        for task in given_up:
            task.cancel()
        out = await asyncio.gather(*asked, return_exceptions=True)
        done.set()
        await asyncio.gather(*others)
        for task, outcome in zip(asked, out, strict=True):
            assert isinstance(outcome, Completion) or (task in given_up and isinstance(outcome, asyncio.CancelledError))
        for fake in router.replicas:
            fake.become("alive")
        await fleet.restarted()
        await fleet.publish(version + 1)
        assert router.serving == {0, 1, 2}
        assert router.placement.outstanding == [0, 0, 0]
        assert all(fake.closed for fake in fleet.made if fake not in router.replicas)
        await router.close()

    in_loop(body)
