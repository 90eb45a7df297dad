"""The local cluster keeps the contract, and shares memory with its caller."""

import asyncio

import pytest

from tests.contracts.cluster_contract import ClusterContract, Counter, CounterConfig
from whet.cluster.base import Cluster, Placement
from whet.cluster.local import LocalCluster


class TestLocalCluster(ClusterContract):
    @pytest.fixture
    def cluster(self) -> Cluster:
        return LocalCluster()


def test_arguments_and_results_are_not_copied():
    async def run() -> None:
        group = LocalCluster().launch(Counter, CounterConfig(), Placement())
        payload = [1, 2]
        [(_, returned)] = await group.scatter("echo", [payload])
        assert returned is payload
        await group.close()

    asyncio.run(run())


def test_a_timeout_error_of_a_worker_is_not_taken_for_the_deadline():
    class Impatient(Counter):
        def where(self):
            raise TimeoutError("the worker's own")

    async def run() -> None:
        group = LocalCluster().launch(Impatient, CounterConfig(), Placement())
        with pytest.raises(TimeoutError, match="the worker's own"):
            await group.call("where")
        await group.close()

    asyncio.run(run())
