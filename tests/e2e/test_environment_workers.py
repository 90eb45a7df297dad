"""Whole runs whose environments are played in worker processes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.toy import toy_recipe
from whet.base.errors import WhetError
from whet.metrics.rollout_file import read_rollouts
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.run.run import start

LOSSES = ("environment_workers/", "failures/", "episodes/failed")


def trained(tiny_model: Path, folder: Path, data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any], bytes]:
    """The metrics, tokens and weights of a run of two steps, without what counts lost workers."""
    start(toy_recipe(tiny_model, steps=2, data=data, rollouts={"retry_delay": 0.0, "retries": 5}), folder)
    rows = [without_time(row) for row in read_metrics(folder / "metrics.jsonl")]
    numbers = [{name: row[name] for name in row if not name.startswith((*LOSSES, "tokens/"))} for row in rows]
    played = [(record.tokens, record.logprobs, record.reward) for record in read_rollouts(folder, 1)]
    return numbers, played, (folder / "checkpoints/step-000002/policy/model.safetensors").read_bytes()


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_with_workers_gives_the_same_bits_also_if_one_dies(dies: bool, tiny_model: Path, tmp_path: Path) -> None:
    here = trained(tiny_model, tmp_path / "here", {"type": "tests.toy:Lowercase"})
    crashing = {"type": "tests.tasks.worker_tasks:CrashesOnce", "folder": str(tmp_path)}
    data = {"type": "workers", "processes": 2, "taskset": crashing if dies else "tests.toy:Lowercase"}
    assert trained(tiny_model, tmp_path / "there", data) == here
    rows = read_metrics(tmp_path / "there" / "metrics.jsonl")
    assert [row["environment_workers/restarts"] for row in rows if "environment_workers/restarts" in row] == [1] * dies


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_a_run_with_workers_on_ray_gives_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    here = trained(tiny_model, tmp_path / "here", {"type": "tests.toy:Lowercase"})
    there = {"type": "ray_workers", "taskset": "tests.toy:Lowercase"}
    assert trained(tiny_model, tmp_path / "there", there) == here


@pytest.mark.usefixtures("forked_children")
def test_a_blend_plays_each_part_where_its_recipe_says(tiny_model: Path, tmp_path: Path) -> None:
    parts = {"here": {"taskset": "tests.toy:Lowercase"}, "there": {"taskset": "tests.toy:Lowercase"}}
    here = trained(tiny_model, tmp_path / "here", {"type": "blend", "of": parts})
    parts["there"] = {"taskset": {"type": "workers", "processes": 1, "taskset": "tests.toy:Lowercase"}}  # type: ignore[dict-item]
    assert trained(tiny_model, tmp_path / "there", {"type": "blend", "of": parts}) == here


@pytest.mark.usefixtures("forked_children")
def test_an_episode_that_always_kills_its_worker_is_a_failure_with_its_cause(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "workers", "processes": 1, "taskset": "tests.tasks.worker_tasks:Crashes"}
    recipe = toy_recipe(tiny_model, data=data, rollouts={"retries": 1, "retry_delay": 0.0})
    with pytest.raises(WhetError, match="environment worker 0: its process was killed by SIGKILL"):
        start(recipe, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any(name in row for row in rows for name in ("reward/mean", "evaluation/reward"))
