"""A service in a separate Ray actor, on a Ray cluster that is started for it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.util import find_spec

import pytest

from tests.cluster.workers import alive
from tests.contracts.cluster_contract import CounterConfig
from tests.contracts.fault_contract import eventually
from whet.base.errors import DeadlineError, GeneratorError, WhetError, WorkerError
from whet.cluster.base import RankInfo, Service
from whet.cluster.config import LocalClusterConfig, RayClusterConfig
from whet.config import Config

ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


class Waiter:
    """Counts waiting calls."""

    def __init__(self, config: Config, info: RankInfo) -> None:
        self.waiting = self.cancelled = 0
        self.released = asyncio.Event()

    def pid(self) -> int:
        return os.getpid()

    async def wait(self, seconds: float) -> int:
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.released.wait()
            return self.waiting
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1

    def counts(self) -> tuple[int, int]:
        return self.waiting, self.cancelled

    async def release(self) -> None:
        self.released.set()

    async def fail(self) -> None:
        raise GeneratorError("no engine")

    async def close(self) -> None:
        """Nothing to release."""


def run_with_service(work: Callable[[Service], Awaitable[None]], deadline: float = 3.0) -> None:
    async def go() -> None:
        service = RayClusterConfig(cpus_per_rank=0.5).build().serve(Waiter, CounterConfig(), 1, deadline)
        try:
            await work(service)
        finally:
            async with asyncio.timeout(100):
                await service.close()
        with pytest.raises(WhetError, match=r"Waiter\.pid was called after it was closed"):
            await service.call("pid")

    asyncio.run(go())


@ray
@pytest.mark.slow
def test_calls_run_concurrently_and_abandoned_ones_are_cancelled() -> None:
    async def work(service: Service) -> None:
        waits = [asyncio.ensure_future(service.call("wait", 600.0)) for _ in range(1200)]
        gone = asyncio.ensure_future(service.call("wait", 600.0))
        while await service.call("counts") != (1201, 0):
            await asyncio.sleep(0.1)
        gone.cancel()
        while await service.call("counts") != (1200, 1):
            await asyncio.sleep(0.1)
        await asyncio.sleep(16.0)
        await service.call("release")
        assert max(await asyncio.gather(*waits)) == 1200, "longer than the deadline, for its process answers"
        with pytest.raises(GeneratorError, match="no engine"):
            await service.call("fail")

    run_with_service(work, deadline=15.0)


@ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "text"),
    [(signal.SIGKILL, WorkerError, "unexpectedly"), (signal.SIGSTOP, DeadlineError, r"Waiter \(pid \d+ on .* for 3 s")],
)
def test_a_process_that_dies_or_freezes_fails_every_call(how: int, error: type[Exception], text: str) -> None:
    async def work(service: Service) -> None:
        process = await service.call("pid")
        assert f"pid {process} on node " in service.where
        waits = [asyncio.ensure_future(service.call("wait", 600.0)) for _ in range(2)]
        await asyncio.sleep(0.5)
        os.kill(process, how)
        for wait in waits:
            with pytest.raises(error, match=text):
                await asyncio.wait_for(wait, 100.0)
        processes.append(process)

    processes: list[int] = []
    run_with_service(work)
    assert eventually(lambda: not alive(processes[0]))


def test_a_cluster_without_nodes_hosts_nothing() -> None:
    with pytest.raises(WhetError, match="set cluster=ray"):
        LocalClusterConfig().build().serve(Waiter, CounterConfig(), 1, 3.0)
