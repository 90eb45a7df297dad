"""The contract of clusters with worker processes about faults. Subclass ``FaultContract`` and define the
``cluster`` fixture."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

import pytest

from tests.cluster.workers import Choir, Talker, alive
from tests.contracts.cluster_contract import Counter, CounterConfig, deadline, in_event_loop
from whet.base.errors import DeadlineError, WorkerError
from whet.cluster.base import Cluster, Placement
from whet.processes.machine import threads_per_rank


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


class FaultContract:
    @in_event_loop
    async def test_ranks_meet_at_the_rendezvous(self, cluster: Cluster) -> None:
        first = cluster.launch(Choir, CounterConfig(), Placement(ranks=2, deadline=120.0))
        second = cluster.launch(Choir, CounterConfig(), Placement(ranks=2, deadline=120.0))
        assert await asyncio.gather(first.call("total", 1.0), second.call("total", 2.0)) == [[3.0, 3.0], [5.0, 5.0]]
        await asyncio.gather(first.close(), second.close())

    @pytest.mark.parametrize("method", ["total_unless", "where"])
    @in_event_loop
    async def test_a_rank_that_is_killed_is_named_at_once(self, cluster: Cluster, method: str) -> None:
        group = cluster.launch(Choir, CounterConfig(), Placement(ranks=2, deadline=120.0))
        pids = [pid for pid, _ in await group.call("thread")]
        with pytest.raises(WorkerError, match=rf"Choir\.total_unless .* rank 1 of 2 \(pid {pids[1]} on .* is gone: "):
            await group.call("total_unless", 1, "dies")
        with pytest.raises(WorkerError, match=rf"Choir\.{method} .* rank 1 of 2"):
            await group.call(method, *(1, "dies") * (method == "total_unless"))
        await group.close()
        assert eventually(lambda: not any(map(alive, pids)))

    @in_event_loop
    async def test_a_frozen_rank_runs_into_the_deadline_and_is_ended_by_close(self, cluster: Cluster) -> None:
        group = cluster.launch(Choir, CounterConfig(), Placement(ranks=2, deadline=120.0))
        pids = [pid for pid, _ in await group.call("thread")]
        late = rf"Choir\.total_unless .* 2 s on rank 0 of 2 \(pid {pids[0]} on"
        with deadline(group, 2.0), pytest.raises(DeadlineError, match=late):
            await group.call("total_unless", 0, "freezes")
        await group.close()
        assert eventually(lambda: not any(map(alive, pids)))

    @in_event_loop
    async def test_an_exception_of_one_rank_does_not_wait_for_ranks_in_a_collective(self, cluster: Cluster) -> None:
        group = cluster.launch(Choir, CounterConfig(), Placement(ranks=2, deadline=120.0))
        pids = [pid for pid, _ in await group.call("thread")]
        with pytest.raises(RuntimeError, match=r"Stubborn: out of luck") as caught:
            await group.call("total_unless", 0, "fails")
        await group.close()
        assert f"in Choir.total_unless on rank 0 of 2 (pid {pids[0]} on " in str(caught.value.__cause__)
        assert "raise Stubborn" in str(caught.value.__cause__)
        assert eventually(lambda: not any(map(alive, pids)))

    @in_event_loop
    async def test_ranks_that_follow_end_with_the_first_one_in_any_way(self, cluster: Cluster) -> None:
        group = cluster.launch(Choir, CounterConfig(), Placement(ranks=3, deadline=120.0))
        lead = group.lead("follow", until="end")
        assert [await lead.call("sum") for _ in range(5)] == [3.0] * 5
        await lead.end()
        failing = group.lead("follow", until="end")
        with pytest.raises(RuntimeError, match="Stubborn: out of luck"):
            await failing.call("sum", True)
        abandoned = group.lead("follow", until="end")
        assert await abandoned.call("sum") == 3.0
        abandoned.abandon()
        assert await group.call("total", 1.0) == [6.0] * 3
        lead = group.lead("follow", 2, until="end")
        assert await lead.call("sum") == 3.0
        with pytest.raises(WorkerError, match=r"Choir\.sum failed because rank 2 of 3 \(pid .* is gone: "):
            await lead.call("sum")
        await group.close()

    @in_event_loop
    async def test_close_leaves_no_process(self, cluster: Cluster) -> None:
        group = cluster.launch(Counter, CounterConfig(), Placement(ranks=3))
        pids = {pid for pid, _ in await group.call("thread")}
        assert len(pids) == 3
        assert os.getpid() not in pids
        await group.close()
        assert eventually(lambda: not any(map(alive, pids)))

    @in_event_loop
    async def test_log_records_of_a_worker_are_emitted_here(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = cluster.launch(Talker, CounterConfig(), Placement(ranks=2))
        with caplog.at_level(logging.INFO, "whet"):
            await group.call("warn")
        await group.close()
        records = {(r.name, r.levelname, r.getMessage()) for r in caplog.records}
        assert records == {("whet.somewhere", "WARNING", text) for text in ("it is 0", "rank 1: it is 1")}

    @in_event_loop
    async def test_a_result_that_cannot_be_pickled_is_an_error_and_the_worker_stays_alive(
        self, cluster: Cluster
    ) -> None:
        group = cluster.launch(Talker, CounterConfig(), Placement())
        with pytest.raises(Exception, match="pickle"):
            await group.call("unpicklable")
        assert await group.call("add", 1) == [1]
        await group.close()

    @in_event_loop
    async def test_cores_are_divided_among_ranks(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        pair = cluster.launch(Talker, CounterConfig(), Placement(ranks=2))
        assert await pair.call("environment", "OMP_NUM_THREADS") == [str(threads_per_rank(2))] * 2
        await pair.close()
        alone = cluster.launch(Talker, CounterConfig(), Placement())
        assert await alone.call("environment", "OMP_NUM_THREADS") == [None]
        await alone.close()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        configured = cluster.launch(Talker, CounterConfig(), Placement(ranks=2))
        assert await configured.call("environment", "OMP_NUM_THREADS") == ["3", "3"]
        await configured.close()
