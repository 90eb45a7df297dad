"""Workers in Ray actors keep the contract, on this machine and on several nodes; a cluster that is started here is
private."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.contracts.cluster_contract import ClusterContract
from tests.contracts.fault_contract import FaultContract
from whet.cluster.base import Cluster
from whet.cluster.config import RayClusterConfig
from whet.cluster.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """A Ray of this machine."""
    cluster = RayCluster(RayClusterConfig(cpus_per_rank=0.25))
    yield cluster
    asyncio.run(cluster.close())


class TestRayCluster(ClusterContract, FaultContract):
    @pytest.fixture
    def cluster(self, started: RayCluster) -> Cluster:
        return started
