"""The run folder after a start, a failure, a resume and an evaluation."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.forks import whet_fork
from tests.rows import write_rows
from tests.toy import Lowercase, read_settings, toy_recipe, write_recipe
from whet.base.errors import ConfigError, DataError, WhetError
from whet.checkpoint.manifest import CheckpointError
from whet.cli.main import main
from whet.core.types import Task
from whet.learner.learner import WorkerLearner
from whet.metrics.rollout_file import read_rollouts, rollout_path
from whet.metrics.sinks.jsonl import read_metrics
from whet.processes.compute import run_computing
from whet.run import run
from whet.run.build import trained_weights
from whet.run.evaluate_model import evaluate_model
from whet.run.folder import check_free
from whet.show.report import write_report


def test_a_folder_whose_start_failed_can_be_used_again(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(WhetError, match="there is no such folder"):
        run.start(toy_recipe(tmp_path / "missing"), folder)
    assert run.start(toy_recipe(tiny_model, steps=1), folder) == folder
    with pytest.raises(ConfigError, match="not empty"):
        run.start(toy_recipe(tiny_model, steps=1), folder)


def test_a_folder_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"link/run: .*link is a link to .*gone, which does not exist"):
        check_free(tmp_path / "link" / "run")


def test_a_folder_whose_rows_were_wrong_can_be_used_again(tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "", "completion": "b"}, {"prompt": "a", "completion": "b"}])
    data = {"type": "supervised", "path": str(rows), "batch_size": 1}
    recipe = read_settings({"steps": 1, "model": str(tiny_model), "algorithm": "sft", "data": data})
    folder = tmp_path / "run"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'prompt'"):
        run.start(recipe, folder)
    write_rows(rows, [{"prompt": "a", "completion": "b"}])
    assert run.start(recipe, folder) == folder


def test_overrides_of_a_resume_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
    run.resume(folder, ["steps=2", "optimizer.lr=0.5"])
    kept = YAML(typ="safe").load((folder / "recipe.yaml").read_text())
    assert (kept["steps"], kept["optimizer"]["lr"]) == (2, 0.5)
    with pytest.raises(ConfigError, match="has done 2 steps already"):
        run.resume(folder, ["steps=1"])


def test_metrics_are_in_the_run_folder_with_any_sinks(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=1, sinks=["console"]), tmp_path / "run")
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == 1


def test_a_best_metric_that_is_never_measured_is_a_warning(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy_recipe(tiny_model, steps=2, evaluation={"every": 1}, checkpoints={"best_metric": "evaluation/acuracy"})
    run.start(recipe, tmp_path / "run")
    assert capsys.readouterr().err.count("evaluation/acuracy is not measured") == 1


class Elsewhere(Lowercase):
    """A grader that changes the working folder."""

    folder: str

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        os.chdir(self.folder)
        return await super().grade(task, answer)


def test_a_relative_run_folder_stays_where_it_was_when_the_working_folder_changes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    data = {"type": "tests.e2e.test_run_folder:Elsewhere", "folder": str(other)}
    run.start(toy_recipe(tiny_model, steps=1, data=data), Path("run"))
    assert (tmp_path / "run/checkpoints/step-000001/policy/learner.json").is_file()
    assert (tmp_path / "run/metrics.jsonl").is_file()
    assert list(other.iterdir()) == []


def test_a_learner_that_saved_nothing_that_can_be_seen_publishes_no_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(self: WorkerLearner, folder: Path) -> None:
        await self._group.call("state.save", tmp_path)  # as on a node with another folder of the same name

    monkeypatch.setattr(WorkerLearner, "save", elsewhere)
    with pytest.raises(CheckpointError, match=r"learner of policy .*has no learner\.json"):
        run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "LoRA"])
def test_a_run_is_evaluated_with_the_weights_it_ended_with(
    tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    recipe = toy_recipe(tiny_model, steps=2, model={"lora": lora}, checkpoints={"keep_best": 0, "keep_last": 1})
    folder = run.start(recipe, tmp_path / "run")
    trained, untrained = (dict(trained_weights(recipe, run).tensors()) for run in (folder, None))
    assert trained.keys() == untrained.keys()
    assert any(not trained[name].equal(untrained[name]) for name in trained)
    assert run_computing(evaluate_model(recipe, run=folder)).n == 4


@pytest.mark.slow
def test_two_runs_of_different_models_are_compared(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = (toy_recipe(tiny_model, steps=1, model={"lora": {"rank": rank}}) for rank in (2, 4))
    large = large.model_copy(update={"chat_template": "plain"})
    runs = [run.start(recipe, tmp_path / name) for name, recipe in (("small", small), ("large", large))]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(runs[0]), "--against", str(runs[1]), "--json"])
    found = json.loads(capsys.readouterr().out)
    own = [
        run_computing(evaluate_model(recipe, run=folder)) for recipe, folder in zip((small, large), runs, strict=True)
    ]
    assert [found["reward"], found["against/reward"]] == [report.reward for report in own]
    assert own[0].reward != own[1].reward
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(runs[0]), "--model", str(runs[1]), "--json"])
    assert json.loads(capsys.readouterr().out)["reward"] == own[1].reward


class OneBroken(Lowercase):
    """The grader of one task is never there."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if task.uid.endswith("/3"):
            raise ConnectionError("the grader is \x1b[2Jaway")
        return await super().grade(task, answer)


def test_a_lost_group_is_recorded_with_its_error_and_can_be_looked_at(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy_recipe(
        tiny_model,
        steps=1,
        data={"type": "tests.e2e.test_run_folder:OneBroken"},
        rollouts={"prompts_per_step": 11, "retries": 0},
        evaluation={"enabled": False},
    )
    folder = run.start(recipe, tmp_path / "run")
    records = list(read_rollouts(folder, 1))
    failed = [record for record in records if record.status == "failed"]
    assert len(records) - len(failed) == 44
    assert {record.task for record in failed} <= {"toy/train/3"}
    assert all(record.reward is None and not record.tokens and "write letters" in record.prompt for record in failed)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["view", str(folder), "--only", "failed"])
    shown = capsys.readouterr().out
    assert len(failed) == shown.count("error: ") == 4
    assert "ConnectionError('the grader is" in shown
    assert "\x1b[2J" not in shown
    write_report(folder)


def test_five_interrupts_of_a_run_end_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1000))
    with whet_fork("train", str(recipe), "--folder", "run", folder=tmp_path) as process:
        deadline = time.monotonic() + 120
        while not rollout_path(tmp_path / "run", 2).exists():
            assert process.poll() is None, process.communicate(60)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        said = process.communicate(timeout=60)[1]
    said = said.removesuffix("Report so far: run/report.html\n")  # of a slow machine, which has written one by now
    assert (process.returncode, said) == (130, "interrupted. Resume with: whet resume run\n")
