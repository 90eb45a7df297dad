"""Workers in Ray actors keep the contract, on this machine and on several nodes; a cluster that is started here is
private."""

import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.cluster.workers import Talker
from tests.contracts.cluster_contract import ClusterContract, Counter, CounterConfig, in_event_loop
from tests.contracts.fault_contract import FaultContract
from whet.base.errors import WhetError
from whet.cluster.base import Cluster, Placement
from whet.cluster.config import RayClusterConfig
from whet.cluster.ray_cluster import RayCluster
from whet.cluster.ray_room import Claims

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """Yield a private Ray cluster on this machine."""
    cluster = RayCluster(RayClusterConfig(cpus_per_rank=0.25))
    yield cluster
    asyncio.run(cluster.close())


class TestRayCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, started: RayCluster) -> Cluster:
        return started


@pytest.mark.slow
class TestFaultsOfRay(FaultContract):
    @pytest.fixture
    def cluster(self, started: RayCluster) -> Cluster:
        return started


@in_event_loop
async def test_workers_have_the_priority_of_the_run(started: RayCluster) -> None:
    group = started.launch(Talker, CounterConfig(), Placement(ranks=2))
    assert await group.call("niceness") == [os.nice(0)] * 2
    await group.close()


@in_event_loop
async def test_more_ranks_than_this_machine_has_cores_for_are_refused_at_once(started: RayCluster) -> None:
    group = started.launch(Counter, CounterConfig(), Placement(ranks=200))
    with pytest.raises(WhetError, match=r"200 ranks of Counter need 0\.25 CPU each, but .*lower cluster\."):
        await group.call("where")
    await group.close()


@in_event_loop
async def test_a_group_that_would_wait_for_another_of_the_same_run_is_refused_at_once(started: RayCluster) -> None:
    import ray

    group = started.launch(Counter, CounterConfig(), Placement())
    await group.call("where")
    await group.close()
    more_than_half = ray.cluster_resources()["CPU"] // 2 + 1
    run = RayCluster(RayClusterConfig(cpus_per_rank=more_than_half))
    first = run.launch(Counter, CounterConfig(), Placement())
    await first.call("where")
    second = run.launch(Counter, CounterConfig(), Placement())
    with pytest.raises(WhetError, match=r"1 ranks of Counter need .* of which 1 ranks of Counter hold \d+ CPU; "):
        await second.call("where")
    await second.close()
    await first.close()


def test_claimed_resources_count_until_they_are_released() -> None:
    claims, total = Claims(), {"CPU": 4.0, "GPU": 2.0}
    assert claims.claim("policy", "the policy", {"CPU": 2.0, "GPU": 1.0}, total) is None
    assert claims.claim("critic", "the critic", {"CPU": 1.0, "GPU": 1.0}, total) is None
    assert claims.claim("judge", "the judge", {"CPU": 1.0, "GPU": 1.0}, total) == (
        "the cluster has 4 CPU and 2 GPU, of which the policy hold 2 CPU and 1 GPU, the critic hold 1 CPU and 1 GPU"
    )
    claims.release("judge")
    claims.release("critic")
    assert claims.claim("judge", "the judge", {"CPU": 1.0, "GPU": 1.0}, total) is None
    assert claims.claim("elsewhere", "it", {"TPU": 1.0}, total) is not None
