"""Runs over the nodes of a Ray cluster: engines on two of them and the learner on a third, or both on the same two. The
nodes are processes of this machine, each with one core for Ray. Each run is a separate process, because a process can't
join another Ray after the worker of a private Ray was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.e2e.test_restarts import hosts, measured, restarts
from tests.toy import toy_recipe
from whet.metrics.sinks import Kind, Sink, SinkConfig, Value
from whet.metrics.sinks.jsonl import read_metrics
from whet.rollouts.audit import audit
from whet.run.run import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed"),
]
ROOT = Path(__file__).parents[2]


@contextmanager
def nodes() -> Iterator[Any]:
    """A head without cores, and three nodes of one."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for cores in (0, 1, 1, 1):
        cluster.add_node(num_cpus=cores, num_gpus=0, include_dashboard=False)
    Strikes.nodes = cluster
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


ENGINE, LEARNER = "RayAsyncHost", "RayHost"


def raylets(name: str) -> list[int]:
    """Return the nodes on which a run has something, by their process."""
    return [psutil.Process(process).ppid() for process in hosts(name)]


class Strikes(SinkConfig):
    """An engine is killed after step 2, the node of the learner after step 4; another node comes in its place."""

    nodes: ClassVar[Any] = None
    places: ClassVar[list[int]] = []
    done: ClassVar[set[int]] = set()

    def open(self, folder: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> Sink:
        return _Strikes()


class _Strikes(Sink):
    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        if step in Strikes.done:
            return
        Strikes.done.add(step)
        if step == 1:
            Strikes.places = [*raylets(ENGINE), *raylets(LEARNER)]
        if step == 2:
            os.kill(hosts(ENGINE)[0], signal.SIGKILL)
        if step == 4:
            (lost,), cluster = raylets(LEARNER), Strikes.nodes
            cluster.add_node(num_cpus=1, num_gpus=0, include_dashboard=False)
            of = {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}
            cluster.remove_node(of[lost], allow_graceful=False)


SETTINGS: dict[str, Any] = {
    "steps": 7,
    "evaluation": {"enabled": False},
    "checkpoints": {"every": 3},
    "rollouts": {"prompts_per_step": 4},
}


def run_over_nodes(model: Path, folder: Path) -> None:
    with nodes() as cluster:
        recipe = toy_recipe(
            model,
            **SETTINGS,
            cluster={"type": "ray", "address": cluster.address},
            generator={"type": "tests.engines.hosted:HostableConfig", "on_cluster": True, "replicas": 2},
            weights={"transport": "collective", "deadline": 60.0},
            sinks=["jsonl", {"type": "tests.e2e.test_nodes:Strikes"}],
        )
        start(recipe, folder)
    assert len(Strikes.places) == len(set(Strikes.places)) == 3


class Places(SinkConfig):
    """The nodes of engines and learner after each step. An engine is killed after step 2."""

    of_engines: ClassVar[dict[int, set[int]]] = {}
    of_learner: ClassVar[dict[int, set[int]]] = {}

    def open(self, folder: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> Sink:
        return _Places()


class _Places(Sink):
    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        if step in Places.of_engines or not step:
            return
        Places.of_engines[step], Places.of_learner[step] = set(raylets(ENGINE)), set(raylets(LEARNER))
        if step == 2:
            os.kill(hosts(ENGINE)[0], signal.SIGKILL)


def run_on_shared_nodes(model: Path, folder: Path) -> None:
    with nodes() as cluster:
        recipe = toy_recipe(
            model,
            **SETTINGS,
            parallel={"fsdp": 2},
            cluster={"type": "ray", "address": cluster.address, "strategy": "spread"},
            generator={"type": "tests.engines.hosted:HostableConfig", "on_cluster": True, "replicas": 2},
            devices={"placement": "colocated"},
            sinks=["jsonl", {"type": "tests.e2e.test_nodes:Places"}],
        )
        start(recipe, folder)
    last, both = SETTINGS["steps"], Places.of_learner[1]
    assert len(both) == 2
    assert all(nodes == both for nodes in Places.of_learner.values())
    assert Places.of_engines[1] == Places.of_engines[last] == both, "an engine that was killed is replaced where it was"


def in_another_process(name: str, model: Path, run: Path) -> None:
    code = f"import sys; from pathlib import Path; from tests.e2e.test_nodes import {name} as go; "
    command = [sys.executable, "-c", code + "go(*map(Path, sys.argv[1:]))", model, run]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)  # empty: where it runs
    subprocess.run(command, check=True, timeout=500, cwd=run.parent, env=os.environ | {"PYTHONPATH": path})


def test_engines_take_turns_with_the_learner_on_its_nodes(tiny_model: Path, tmp_path: Path) -> None:
    here, run = measured(start(toy_recipe(tiny_model, **SETTINGS), tmp_path / "here")), tmp_path / "run"
    in_another_process("run_on_shared_nodes", tiny_model, run)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert sum(row.get("generator/lost", 0) for row in rows) == 1
    there = measured(run)
    assert [row["step"] for row in there] == [row["step"] for row in here]
    for one, other in zip(here[1:], there[1:], strict=True):
        for name in ("reward/mean", "loss", "answer/length_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), (one["step"], name)


def test_a_run_that_loses_an_engine_and_then_the_learners_node_learns_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    here, run = measured(start(toy_recipe(tiny_model, **SETTINGS), tmp_path / "here")), tmp_path / "run"
    in_another_process("run_over_nodes", tiny_model, run)
    assert restarts(run) == [1.0]
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert sum(row.get("generator/lost", 0) for row in rows) == 1
    found = audit(run)
    assert not found.violations
    assert (found.step, found.later) == (7, 0)
    there = measured(run)
    assert [row["step"] for row in there] == [row["step"] for row in here]
    for one, other in zip(here[1:], there[1:], strict=True):
        for name in ("reward/mean", "loss", "answer/length_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), (one["step"], name)
