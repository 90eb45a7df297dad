"""The contract of every cluster. Subclass ``ClusterContract`` in a test module and define the ``cluster`` fixture."""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.base.errors import DeadlineError, WhetError
from whet.cluster.base import Cluster, Placement, RankInfo, WorkerGroup
from whet.cluster.group import LinkedGroup
from whet.config import Config


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a new event loop."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))  # type: ignore[arg-type]

    return run


class CounterConfig(Config):
    start: int = 0
    broken: bool = False


class Counter:
    """A worker of the tests. It notices when two of its methods run at once."""

    def __init__(self, config: CounterConfig, info: RankInfo) -> None:
        if config.broken:
            raise WhetError("the counter is broken; repair it")
        self.count = config.start
        self.info = info
        self.inside = False

    def add(self, number: int, seconds: float = 0.0) -> int:
        assert not self.inside
        self.inside = True
        time.sleep(seconds)
        self.count += number
        self.inside = False
        return self.count

    def add_at_a_gate(self, number: int, folder: str) -> int:
        """Add once the folder has a file ``gate``; the file ``began`` shows that the call has begun."""
        Path(folder, "began").touch()
        end = time.monotonic() + 100
        while not Path(folder, "gate").exists():
            assert time.monotonic() < end, "the gate was never opened"
            time.sleep(0.01)
        return self.add(number)

    def where(self) -> tuple[int, int, int, int]:
        return (self.info.rank, self.info.ranks, self.info.shard, self.info.shards)

    def thread(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    def echo(self, shard: Any, *rest: Any) -> tuple[Any, ...]:
        return (self.info.rank, shard, *rest)

    def fail(self, rank: int) -> None:
        if self.info.rank == rank:
            raise WhetError(f"rank {rank} ran out of luck; try again")

    def close(self) -> None:
        self.count = -1


async def working_at_a_gate(group: WorkerGroup, folder: Path) -> asyncio.Task[list[Any]]:
    """Return a call that has begun in the worker and doesn't end before the folder has a file ``gate``."""
    call = asyncio.create_task(group.call("add_at_a_gate", 1, str(folder)))
    while not (folder / "began").exists() and not call.done():
        await asyncio.sleep(0.01)
    return call


@contextmanager
def deadline(group: WorkerGroup, seconds: float) -> Iterator[None]:
    """Give calls that begin in the block another deadline: the first call of a group waits for processes."""
    assert isinstance(group, LinkedGroup)
    placement = group.placement
    group.placement = replace(placement, deadline=seconds)
    try:
        yield
    finally:
        group.placement = placement


class ClusterContract:
    @in_event_loop
    async def test_a_call_reaches_every_rank_and_answers_in_order(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(start=5), Placement(ranks=3))
        assert await group.call("where") == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
        assert await group.call("add", 2) == [7, 7, 7]
        await group.close()

    @in_event_loop
    async def test_ranks_of_one_shard_get_the_same_shard_and_answer_once(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=4, ranks_per_shard=2))
        assert await group.call("where") == [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]
        assert await group.scatter("echo", ["a", "b"], 7) == [(0, "a", 7), (2, "b", 7)]
        await group.close()

    @in_event_loop
    async def test_a_wrong_number_of_shards_is_refused(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=2))
        with pytest.raises(ValueError, match="3 shards"):
            await group.scatter("echo", [1, 2, 3])
        await group.close()

    @in_event_loop
    async def test_calls_of_one_worker_never_overlap_and_keep_their_order(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement())
        results = await asyncio.gather(*(group.call("add", 1, 0.01) for _ in range(5)))
        assert results == [[1], [2], [3], [4], [5]]
        assert len({tuple(await group.call("thread")) for _ in range(3)}) == 1
        await group.close()

    @in_event_loop
    async def test_the_event_loop_is_not_blocked_by_a_worker(self, cluster: Cluster, tmp_path: Path) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement())
        working = await working_at_a_gate(group, tmp_path)
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not working.done()
        (tmp_path / "gate").touch()
        assert await working == [1]
        await group.close()

    @in_event_loop
    async def test_an_exception_reaches_the_caller_unchanged_and_the_worker_stays_alive(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=2))
        with pytest.raises(WhetError, match=r"^rank 1 ran out of luck; try again$") as caught:
            await group.call("fail", 1)
        assert type(caught.value) is WhetError
        assert await group.call("add", 1) == [1, 1]
        await group.close()

    @in_event_loop
    async def test_the_first_call_raises_the_error_of_the_constructor(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(broken=True), Placement())
        with pytest.raises(WhetError, match="the counter is broken"):
            await group.call("where")
        await group.close()

    @in_event_loop
    async def test_a_deadline_error_names_the_method_and_the_call_before_it(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(deadline=30.0))
        await group.call("where")
        while not (tmp_path / "began").exists():  # a call that was abandoned before it began never runs
            with deadline(group, 0.05), pytest.raises(DeadlineError, match=r"Counter\.add_at_a_gate .* 0\.05 s"):
                await group.call("add_at_a_gate", 1, str(tmp_path))
        with (
            deadline(group, 0.05),
            pytest.raises(DeadlineError, match=r"Counter\.where .*still busy with add_at_a_gate"),
        ):
            await group.call("where")
        (tmp_path / "gate").touch()
        assert await group.call("add", 0) == [1]
        await group.close()

    @in_event_loop
    async def test_a_call_abandoned_before_it_began_never_runs(self, cluster: Cluster, tmp_path: Path) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement())
        first = await working_at_a_gate(group, tmp_path)
        with deadline(group, 0.05), pytest.raises(DeadlineError):
            await group.call("add", 100)
        (tmp_path / "gate").touch()
        assert await first == [1]
        assert await group.call("add", 0) == [1]
        await group.close()

    @in_event_loop
    async def test_the_first_rank_is_called_alone_while_the_others_follow_in_one_call(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=3))
        lead = group.lead("add", 10, until="where")
        assert [await lead.call("add", number) for number in (1, 2)] == [1, 3]
        of_all = asyncio.create_task(group.call("add", 0))
        await asyncio.sleep(0)  # it begins, with the group's deadline
        not_begun = r"Counter\.thread did not begin .* 0\.05 s, because add was not ended"
        with deadline(group, 0.05), pytest.raises(DeadlineError, match=not_begun):
            await group.call("thread")
        assert not of_all.done()
        assert await lead.end() == (0, 3, 0, 3)
        assert await of_all == [3, 10, 10]
        await group.close()

    @in_event_loop
    async def test_an_error_of_a_rank_that_follows_is_raised_and_calls_continue(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=2))
        lead = group.lead("fail", 1, until="where")
        errors = await asyncio.gather(lead.call("add", 1), lead.end(), return_exceptions=True)
        assert isinstance(errors[1], WhetError)
        assert str(errors[1]) == "rank 1 ran out of luck; try again"
        assert await group.call("add", 1) == [2, 1]
        with pytest.raises(WhetError, match=r"^rank 0 ran out of luck; try again$"):
            await group.lead("add", 1, until="where").call("fail", 0)
        assert await group.call("add", 0) == [2, 2]
        group.lead("add", 1, until="where")
        await group.close()

    @in_event_loop
    async def test_a_closed_group_refuses_calls_and_closing_twice_is_fine(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=2))
        await group.close()
        await group.close()
        with pytest.raises(WhetError, match="after the group was closed"):
            await group.call("where")

    def test_a_placement_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(WhetError, match="multiple"):
            Placement(ranks=3, ranks_per_shard=2)
