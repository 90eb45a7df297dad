"""A Ray cluster of several nodes that is already running. Its nodes are processes of this machine. The file is named
to run before test_ray.py: after a private Ray cluster whose worker was killed, a process can't join another one."""

import asyncio
import os
from collections import Counter as Tally
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.workers import Choir, Talker
from tests.contracts.cluster_contract import CounterConfig, in_event_loop
from tests.contracts.worker_contract import TWO, task
from tests.tasks.worker_tasks import Counting
from whet.base.errors import DeadlineError, WhetError, WorkerError
from whet.cluster.base import Placement
from whet.cluster.config import RayClusterConfig
from whet.cluster.ray_cluster import RayCluster
from whet.cluster.ray_environments import RayWorkerTasks
from whet.processes.service import ServiceLostError
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three nodes of two cores; two of them claim two GPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # else Ray checks the claim
        for gpus in (0, 2, 2):
            cluster.add_node(num_cpus=2, num_gpus=gpus, include_dashboard=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def joined(nodes: Any, **settings: Any) -> RayCluster:
    return RayCluster(RayClusterConfig(address=nodes.address, **settings))


class Placed(Talker):
    """Reports its node and GPUs."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def gpus(self) -> list[str]:
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def visible(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@in_event_loop
async def test_rank_k_of_several_models_shares_the_gpu_of_rank_k(nodes: Any) -> None:
    """Three models of four ranks share four GPUs; no two ranks of one model have the same GPU."""
    cluster = RayCluster(RayClusterConfig(address=nodes.address, cpus_per_rank=0.5, models="together"), models=3)
    groups = [cluster.launch(Placed, CounterConfig(), Placement(4, ranks_per_shard=2)) for _ in range(3)]
    seats = [list(zip(await group.call("node"), await group.call("gpus"), strict=True)) for group in groups]
    assert seats[0] == seats[1] == seats[2]
    assert len({(node, *gpus) for node, gpus in seats[0]}) == 4
    for group in groups[:2]:
        await group.close()
    assert await groups[2].call("gpus") == [gpus for _, gpus in seats[0]], (
        "the end of other groups takes nothing from it"
    )
    await groups[2].close()
    again = joined(nodes, cpus_per_rank=0.5).launch(Placed, CounterConfig(), Placement(4))
    assert len(await again.call("gpus")) == 4, "all resources are free again"
    await again.close()


@pytest.mark.parametrize(("strategy", "each"), [("pack", [4]), ("spread", [2, 2])])
@in_event_loop
async def test_ranks_are_packed_or_spread(nodes: Any, strategy: str, each: list[int]) -> None:
    cluster = joined(nodes, strategy=strategy, cpus_per_rank=0.5, gpus_per_rank=0)
    group = cluster.launch(Placed, CounterConfig(), Placement(ranks=4, ranks_per_shard=2))
    places = await group.call("node")
    assert list(Tally(places).values()) == each
    await group.close()


@in_event_loop
async def test_the_ranks_of_a_shard_share_a_node(nodes: Any) -> None:
    cluster = joined(nodes, strategy="spread", gpus_per_rank=0)
    group = cluster.launch(Placed, CounterConfig(), Placement(ranks=6, ranks_per_shard=2))
    places = await group.call("node")
    assert [places[0], places[2], places[4]] == [places[1], places[3], places[5]]
    assert len(set(places)) == 3
    await group.close()


@in_event_loop
async def test_a_shard_larger_than_every_node_is_divided(nodes: Any) -> None:
    cluster = joined(nodes, gpus_per_rank=0)
    group = cluster.launch(Placed, CounterConfig(), Placement(ranks=4, ranks_per_shard=4))
    places = await group.call("node")
    assert len(set(places)) == 2
    assert places == sorted(places)
    await group.close()


@in_event_loop
async def test_every_rank_has_its_own_gpu_if_the_cluster_has_any(nodes: Any) -> None:
    group = joined(nodes).launch(Placed, CounterConfig(), Placement(ranks=4))
    taken = list(zip(await group.call("node"), await group.call("gpus"), strict=True))
    assert len({(node, *gpus) for node, gpus in taken}) == 4
    assert all(len(gpus) == 1 for _, gpus in taken)
    await group.close()


@in_event_loop
async def test_an_engine_has_gpus_that_no_rank_gets(nodes: Any) -> None:
    service, group = (
        joined(nodes, cpus_per_rank=0.5).serve(Placed, CounterConfig(), 2, 60.0),
        joined(nodes).launch(Placed, CounterConfig(), Placement(2)),
    )
    learners = list(zip(await group.call("node"), await group.call("gpus"), strict=True))
    node, engine_gpus = await service.call("node"), await service.call("gpus")
    assert len({(node, gpu) for gpu in engine_gpus} | {(where, *gpus) for where, gpus in learners}) == 4
    await service.close()
    await group.close()


@in_event_loop
async def test_engines_that_share_a_learners_devices_are_where_its_ranks_are(nodes: Any) -> None:
    """Two engines of two ranks on four GPUs that a learner holds: nothing else is reserved for them."""
    import ray

    cluster = joined(nodes, cpus_per_rank=0.5)
    engines = [cluster.serve(Placed, CounterConfig(), 2, 60.0, shares=first) for first in (0, 2)]
    with pytest.raises(WhetError, match="can't start before the learner is launched"):
        await cluster.serve(Placed, CounterConfig(), 2, 60.0, shares=0).call("node")
    group = cluster.launch(Placed, CounterConfig(), Placement(4, ranks_per_shard=2))
    where, gpus = await group.call("node"), await group.call("gpus")
    left = ray.available_resources()
    for number, engine in enumerate(engines):
        assert await engine.call("node") == where[2 * number] == where[2 * number + 1]
        assert await engine.call("visible") == ",".join(gpus[2 * number] + gpus[2 * number + 1])
    assert len(set(where)) == 2
    assert {kind: ray.available_resources().get(kind) for kind in ("CPU", "GPU")} == {
        kind: left.get(kind) for kind in ("CPU", "GPU")
    }
    between = cluster.serve(Placed, CounterConfig(), 2, 60.0, shares=1)
    with pytest.raises(WhetError, match=r"one node, but .* on several: 1 on .*, 2 on .*; lower the ranks"):
        await between.call("node")
    for each in (*engines, between, group):
        await each.close()


@in_event_loop
async def test_ranks_on_several_nodes_meet(nodes: Any) -> None:
    cluster = joined(nodes, strategy="spread", gpus_per_rank=0)
    group = cluster.launch(Choir, CounterConfig(), Placement(ranks=3, deadline=120.0))
    assert await group.call("total", 1.0) == [6.0, 6.0, 6.0]
    await group.close()


@in_event_loop
async def test_too_few_resources_are_an_error_with_the_resources_of_the_cluster(nodes: Any) -> None:
    cluster = joined(nodes, start_deadline=3.0)
    group = cluster.launch(Placed, CounterConfig(), Placement(ranks=5))
    with pytest.raises(
        DeadlineError, match=r"5 ranks of Placed need 1 CPU and 1 GPU each, but .* 6 CPU and 4 GPU.*3 s"
    ):
        await group.call("node")
    await group.close()


@in_event_loop
async def test_a_group_that_waits_for_resources_can_be_closed(nodes: Any) -> None:
    group = joined(nodes).launch(Placed, CounterConfig(), Placement(ranks=5))
    waiting = asyncio.create_task(group.call("node"))
    await asyncio.sleep(2.0)
    await group.close()
    with pytest.raises(WorkerError, match="closed while it was built"):
        await waiting


@in_event_loop
async def test_closed_groups_free_their_resources(nodes: Any) -> None:
    for _ in range(2):
        group = joined(nodes, start_deadline=60.0).launch(Placed, CounterConfig(), Placement(ranks=4))
        await group.call("node")
        await group.close()


@in_event_loop
async def test_each_worker_class_has_its_runtime_environment(nodes: Any) -> None:
    environment = {"Placed": {"env_vars": {"WHET_TEST": "yes"}}}
    cluster = joined(nodes, gpus_per_rank=0, runtime_env=environment)
    for worker, value in ((Placed, "yes"), (Talker, None)):
        group = cluster.launch(worker, CounterConfig(), Placement())
        assert await group.call("environment", "WHET_TEST") == [value]
        await group.close()


@in_event_loop
async def test_a_lost_node_is_an_error_that_names_the_rank(nodes: Any) -> None:
    node = nodes.add_node(num_cpus=8, include_dashboard=False)
    group = joined(nodes, cpus_per_rank=8, gpus_per_rank=0).launch(Placed, CounterConfig(), Placement())
    await group.call("node")
    working = asyncio.create_task(group.call("add", 1, 60.0))
    await asyncio.sleep(1.0)
    await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
    with pytest.raises(WorkerError, match=r"Placed\.add failed because rank 0 of 1 \(pid \d+ on node [\d.]+\) is gone"):
        await working
    await group.close()


@in_event_loop
async def test_an_environment_worker_whose_node_is_lost_is_replaced_on_another(nodes: Any, tmp_path: Path) -> None:
    taskset = Counting(folder=str(tmp_path))
    tasks = RayWorkerTasks(taskset=taskset, processes=1, address=nodes.address, cpus=8)
    environments = IsolatedEnvironments(tasks.open())
    node = nodes.add_node(num_cpus=8, include_dashboard=False)
    playing = asyncio.create_task(play(environments.make(task("wait")), "x"))
    await play(environments.make(task("")), TWO)
    await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
    with pytest.raises(ServiceLostError, match=r"environment worker 0: its actor \(pid \d+ on node [\d.]+\) is gone"):
        await playing
    nodes.add_node(num_cpus=8, include_dashboard=False)
    _, step = await play(environments.make(task("")), TWO)
    assert (step.reward, environments.restarts) == (1.0, 1)
    await environments.close()


def test_an_address_without_a_cluster_is_an_error_that_names_it() -> None:
    import ray

    ray.shutdown()
    with pytest.raises(WhetError, match=r"no Ray cluster was reached at cluster\.address=127\.0\.0\.1:1 "):
        RayCluster(RayClusterConfig(address="127.0.0.1:1")).launch(Placed, CounterConfig(), Placement())


@in_event_loop
async def test_the_address_of_environment_workers_is_named_as_theirs() -> None:
    import ray

    ray.shutdown()
    environments = RayWorkerTasks(taskset=Counting(), processes=1, address="127.0.0.1:1").open()
    with pytest.raises(WhetError, match=r"no Ray cluster was reached at ray_workers\.address=127\.0\.0\.1:1 "):
        await play(environments.make(task("")), TWO)
    await environments.close()
