"""Killed at any named instant, a run resumes and ends with exactly the metrics of a run that was never killed."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forks import whet
from tests.toy import toy_recipe, write_recipe
from whet.checkpoint.crash_points import CRASH_POINTS
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.rollouts.audit import audit


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [without_time(line) for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def recipe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = toy_recipe(tiny_model, steps=5, checkpoints={"every": 2}, evaluation={"every": 2})
    return write_recipe(tmp_path_factory.mktemp("recipe") / "toy.yaml", made)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = whet("train", str(recipe), "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    return metrics(folder)


def killed_and_resumed(recipe: Path, folder: Path, crash_at: str) -> list[dict[str, Any]]:
    killed = whet("train", str(recipe), "--folder", str(folder), WHET_CRASH_AT=crash_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = whet("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    return metrics(folder)


@pytest.mark.parametrize(
    "crash_at", ["step.updated:4", pytest.param("checkpoint.half_written:2", marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_to_the_same_bits(
    recipe: Path, undisturbed: list[dict[str, Any]], tmp_path: Path, crash_at: str
) -> None:
    assert killed_and_resumed(recipe, tmp_path / "run", crash_at) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in CRASH_POINTS if name not in ("checkpoint.mid_replace", "step.copied") and name[:6] != "mirror"],
)
@pytest.mark.parametrize("visit", [1, 2])
def test_every_crash_point_resumes_to_the_same_bits(
    recipe: Path, undisturbed: list[dict[str, Any]], tmp_path: Path, name: str, visit: int
) -> None:
    if name == "checkpoint.mid_prune":
        if visit > 1:
            pytest.skip("two checkpoints are pruned once")
        recipe = write_recipe(tmp_path / "toy.yaml", _keeping_one(recipe))
    assert killed_and_resumed(recipe, tmp_path / "run", f"{name}:{visit}") == undisturbed


def _keeping_one(recipe: Path) -> Any:
    from whet.config import load
    from whet.run.recipe import Recipe

    return load(Recipe, recipe, ["checkpoints.keep_last=1", "checkpoints.keep_best=0"]).value


@pytest.mark.slow
def test_a_killed_run_with_a_curriculum_resumes_to_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"type": "grpo", "group_size": 2, "filters": ["dynamic_sampling"]}
    rollouts = {"prompts_per_step": 3, "curriculum": {"type": "pass_rate", "retire_after": 1, "recheck_after": 2}}
    made = toy_recipe(tiny_model, steps=6, algorithm=algorithm, rollouts=rollouts, checkpoints={"every": 2})
    recipe = write_recipe(tmp_path / "toy.yaml", made)
    whole = tmp_path / "whole"
    done = whet("train", str(recipe), "--folder", str(whole))
    assert done.returncode == 0, done.stderr
    assert metrics(whole)[-2]["curriculum/pass_rate"] >= 0
    assert killed_and_resumed(recipe, tmp_path / "run", "step.updated:5") == metrics(whole)


def test_rollouts_that_ran_ahead_survive_a_kill(tiny_model: Path, tmp_path: Path) -> None:
    ahead = toy_recipe(tiny_model, steps=4, rollouts={"prompts_per_step": 2, "max_staleness": 1})
    recipe = write_recipe(tmp_path / "toy.yaml", ahead)
    finished = killed_and_resumed(recipe, tmp_path / "run", "step.generated:3")
    assert [line["step"] for line in finished if line["kind"] == "train"] == [0, 1, 2, 3, 4]
    found = audit(tmp_path / "run")
    assert not found.violations
    assert (found.drawn, found.in_flight, found.by_epoch()) == (12, 4, {0: {"trained": 8}})


def test_resuming_a_finished_run_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert whet("train", str(recipe), "--folder", str(folder), "steps=2").returncode == 0
    before = metrics(folder)
    again = whet("resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert f"warning: step 2, the last one, is done; to train for longer: whet resume {folder} steps=4" in again.stderr
    assert metrics(folder) == before


@pytest.mark.slow
def test_a_run_can_be_resumed_for_more_steps(recipe: Path, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert whet("train", str(recipe), "--folder", str(folder), "steps=4").returncode == 0
    assert whet("resume", str(folder), "steps=5").returncode == 0
    assert metrics(folder)[:-2] == undisturbed[:-2]
