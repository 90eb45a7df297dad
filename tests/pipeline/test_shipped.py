"""The pipelines that come with the package: all are valid, and their tiny profiles run from beginning to end."""

import json
from pathlib import Path

import pytest

from tests.forks import whet
from whet.config.loading import recipe_names
from whet.models.config import ModelConfig
from whet.pipeline import graph
from whet.pipeline.config import SHIPPED, load_pipeline
from whet.shells.local import _problem

NAMES = recipe_names(SHIPPED)


@pytest.mark.parametrize("profile", [None, "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_is_valid(name: str, profile: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "check_available", lambda model: None)  # SmolLM2 may not be installed
    loaded = load_pipeline(name, profile=profile)
    jobs = graph.build(loaded, Path("/nowhere"))
    assert loaded.value.stages.keys() <= jobs.keys()
    assert ("base" in jobs) == (profile == "tiny" or name == "pictures")
    assert loaded.value.description


def test_a_stage_runs_in_a_process_and_the_outcome_is_json(tmp_path: Path) -> None:
    words = ("pipeline", "rlvr", "-c", "tiny", "--folder", str(tmp_path / "out"))
    ended = whet(*words, "--only", "base", "--json")
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout)
    assert [(each["name"], each["action"]) for each in outcomes[:2]] == [("base", "run"), ("rl", "not selected")]
    assert (tmp_path / "out/base/config.json").is_file()
    assert "stage 1 of 5, base (random_model): run: it was not run yet" in ended.stderr
    plan = whet(*words, "--dry-run")
    assert "1. base (random_model): up to date" in plan.stdout
    assert f"   whet train {tmp_path}/out/rl.yaml --folder {tmp_path}/out/rl\n" in plan.stdout


def finished(name: str, folder: Path) -> dict[str, dict]:
    """Run a tiny profile to its end, and once more; return its stages by name."""
    words = ("pipeline", name, "-c", "tiny", "--folder", str(folder), "--json")
    ended = whet(*words, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    again = whet(*words)
    assert {each["action"] for each in json.loads(again.stdout)} == {"up to date"}
    return {each["name"]: each for each in json.loads(ended.stdout)}


@pytest.mark.slow
def test_rlhf(tmp_path: Path) -> None:
    stages = finished("rlhf", tmp_path)
    assert stages["pairs"]["values"]["rows"] > 20
    assert stages["judge"]["values"].keys() >= {"accuracy", "accuracy_before"}
    assert stages["result"]["values"].keys() >= {"accuracy", "against/accuracy", "difference_low", "difference_high"}
    assert (tmp_path / "judge.best/model.safetensors").is_file()


@pytest.mark.slow
def test_tool_hallucination_is_unlearned(tmp_path: Path) -> None:
    measured = finished("tool-hallucination", tmp_path)["hallucination"]["values"]
    assert measured["against/accuracy"] < 0.6, "SFT has taught it"
    assert measured["difference_low"] > 0, "DPO unlearns it"


@pytest.mark.slow
def test_rlvr_over_seven_environments(tmp_path: Path) -> None:
    stages = finished("rlvr", tmp_path)
    environments = {name.split("/")[0] for name in stages["result"]["values"] if name.endswith("/accuracy")}
    assert environments >= {"math", "code", "choice", "structure", "instructions", "long_context", "tools"}
    assert (tmp_path / "release/config.json").is_file()


@pytest.mark.slow
def test_distillation(tmp_path: Path) -> None:
    stages = finished("distillation", tmp_path)
    assert stages["teacher"]["values"]["loss"] < stages["teacher"]["values"]["loss_before"] / 2
    lines = [json.loads(line) for line in (tmp_path / "student/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line and line.get("kind", "train") == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    stages = finished("pictures", tmp_path)
    assert stages["sft"]["values"].keys() >= {"loss", "loss_before"}
    assert stages["result"]["values"].keys() >= {"accuracy", "against/accuracy"}
    assert (tmp_path / "rl.best/processor_config.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")
def test_shell(tmp_path: Path) -> None:
    stages = finished("shell", tmp_path)
    assert stages["sft"]["values"]["loss"] < stages["sft"]["values"]["loss_before"]
    assert stages["result"]["values"].keys() >= {"accuracy", "against/accuracy", "difference_low", "difference_high"}
