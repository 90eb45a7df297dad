"""Workers in Ray actors keep the contract, on this machine and on several nodes; a cluster that is started here is
private."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.contracts.cluster_contract import ClusterContract, Counter, CounterConfig, in_event_loop
from tests.contracts.fault_contract import FaultContract
from whet.cluster.base import Cluster, Placement
from whet.cluster.config import RayClusterConfig
from whet.cluster.ray_cluster import RayCluster
from whet.errors import WhetError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """A Ray of this machine."""
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
async def test_more_ranks_than_this_machine_has_room_for_are_refused_at_once(started: RayCluster) -> None:
    group = started.launch(Counter, CounterConfig(), Placement(ranks=200))
    with pytest.raises(WhetError, match=r"200 ranks of Counter need 0\.25 CPU each, but .*lower cluster\."):
        await group.call("where")
    await group.close()
