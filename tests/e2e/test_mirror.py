"""A run that is killed on one machine resumes on another, which has nothing but the mirror, to the same bits."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import metrics
from tests.forks import whet
from tests.toy import toy_recipe, write_recipe
from whet.checkpoint import mirror_files
from whet.checkpoint.mirror import Mirror
from whet.metrics.sinks.jsonl import read_metrics
from whet.run.run import start

SECTIONS: dict[str, Any] = {"evaluation": {"every": 2}, "rollouts": {"keep_groups": True, "max_staleness": 0}}


@pytest.fixture(scope="module")
def recipe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = toy_recipe(tiny_model, steps=5, checkpoints={"every": 2, "keep_last": 1}, **SECTIONS)
    return write_recipe(tmp_path_factory.mktemp("recipe") / "toy.yaml", made)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = whet("train", str(recipe), "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints/step-000005/policy/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("crash_at", "asynchronous"),
    [
        pytest.param("step.updated:4", False, marks=pytest.mark.slow),
        pytest.param("mirror.half_uploaded:20", False, marks=pytest.mark.slow),
        pytest.param("mirror.before_marker:2", False, marks=pytest.mark.slow),
        ("mirror.before_marker:2", True),
        pytest.param("mirror.before_prune:2", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_elsewhere_to_the_same_bits(
    recipe: Path, undisturbed: Path, tmp_path: Path, crash_at: str, asynchronous: bool
) -> None:
    remote = f"file://{tmp_path}/remote"
    changes = [f"checkpoints.mirror={remote}", f"checkpoints.asynchronous={str(asynchronous).lower()}"]
    killed = whet("train", str(recipe), *changes, "--folder", str(tmp_path / "here/one"), WHET_CRASH_AT=crash_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (tmp_path / "here").rename(tmp_path / "lost")
    resumed = whet("resume", f"{remote}/one", "--folder", str(tmp_path / "there/one"))
    assert resumed.returncode == 0, resumed.stderr
    there = tmp_path / "there/one"
    assert metrics(there) == metrics(undisturbed)
    assert weights(there) == weights(undisturbed)
    assert [path.name for path in sorted((there / "groups").iterdir())] == [f"step-{i:06d}.json" for i in range(1, 6)]
    assert {path.name for path in (tmp_path / "remote/one").glob("step-*")} >= {"step-000005.json"}


def test_a_mirror_that_fails_is_counted_and_costs_no_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("the network is down")

    async def begin(mirror: Mirror, step: int | None) -> int:
        return 0  # it would need an answer within the deadline, which is short

    monkeypatch.setattr(mirror_files.Remote, "write_content", broken)
    monkeypatch.setattr(Mirror, "begin", begin)
    checkpoints = {"every": 1, "mirror": f"file://{tmp_path}/remote", "mirror_deadline": 0.2}
    folder = start(toy_recipe(tiny_model, steps=2, checkpoints=checkpoints), tmp_path / "run")
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["checkpoint/mirror_failed"] for line in lines if "checkpoint/mirror_failed" in line] == [1]


def test_what_resume_takes_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("")
    refused = whet("resume", str(tmp_path / "run"), "--folder", str(tmp_path / "other"))
    assert refused.returncode == 2
    assert "is for the URL of a mirror" in refused.stderr
    missing = whet("resume", f"file://{tmp_path}/none", "--folder", str(tmp_path / "other"))
    assert missing.returncode == 1
    assert "has no complete copy of a run" in missing.stderr
