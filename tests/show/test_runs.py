"""Runs are listed with their state and compared with the interval of their difference."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.forks import whet
from whet.base.errors import ConfigError
from whet.checkpoint.lock import is_locked, run_lock
from whet.show.comparison import compare, print_comparison
from whet.show.runs import RunState, find_runs, list_runs, print_runs


def made(folder: Path, right: float, steps: int = 2, **settings: Any) -> Path:
    """Write the folder of a run over 100 held-out tasks, as far as ``whet runs`` reads it."""
    folder.mkdir(parents=True)
    recipe = {"steps": 2, "algorithm": {"type": "grpo"}, "data": "arithmetic", "model": {"path": "a/small"}, **settings}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    lines: list[dict[str, Any]] = [{"step": 0, "kind": "evaluation", "evaluation/accuracy": 0.2, "evaluation/n": 100}]
    lines += [{"step": step, "kind": "train", "loss": 0.5 / step, "time/step": 3.0} for step in range(1, steps + 1)]
    lines += [{"step": steps, "kind": "evaluation", "evaluation/accuracy": right, "evaluation/n": 100}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_running_finished_or_stopped(tmp_path: Path) -> None:
    finished, stopped = made(tmp_path / "a", 0.5), made(tmp_path / "b", 0.5, steps=1)
    assert [RunState.of(run).state for run in (finished, stopped)] == ["finished", "stopped"]
    with run_lock(stopped):
        assert is_locked(stopped)
        assert RunState.of(stopped).state == "running"
    assert not is_locked(stopped)
    assert RunState.of(stopped).as_json()["accuracy_after"] == 0.5
    with pytest.raises(ConfigError, match="is not a run"):
        RunState.of(tmp_path)


def test_a_run_of_epochs_that_failed_before_its_first_step_is_stopped(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "recipe.yaml").write_text("{steps: 0, epochs: 3.0}")  # the data, which give the steps, were not read
    assert RunState.of(run).state == "stopped"
    assert RunState.of(run).as_json()["steps"] is None


def test_two_runs_differ_in_settings_and_results(tmp_path: Path) -> None:
    first = made(tmp_path / "a", 0.5, optimizer={"lr": 1e-5}, description="a try")
    second = made(tmp_path / "b", 0.8, optimizer={"lr": 3e-5, "schedule": "cosine"})
    found = compare(RunState.of(first), RunState.of(second))
    assert found["settings"] == {"optimizer.lr": (1e-5, 3e-5), "optimizer.schedule": (None, "cosine")}
    assert found["accuracy"] == [0.5, 0.8]
    difference = found["difference"]
    assert difference["mean"] == pytest.approx(0.3)
    assert 0.1 < difference["low"] < 0.3 < difference["high"] < 0.5
    assert found["last step"] == {"loss": (0.25, 0.25), "time/step": (3.0, 3.0)}


def test_runs_without_an_accuracy_are_listed_and_compared_by_their_held_out_loss(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, 0.5) for name in "ab"]
    for run, last in zip(runs, (1.5, 0.5), strict=True):
        lines = [{"step": step, "kind": "evaluation", "evaluation/loss": loss, "evaluation/n": 8}
                 for step, loss in ((0, 2.25), (2, last))]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(file=StringIO(), width=200)
    print_runs(tmp_path, console)
    print_comparison(*map(RunState.of, runs), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss 2.250 → 1.500" in printed
    assert re.search(r"held-out loss +│ 2.250 → 1.500 │ 2.250 → 0.5", printed)


def test_a_narrow_terminal_shows_runs_with_state_and_step(tmp_path: Path) -> None:
    made(tmp_path / "ab", 0.5)
    console = Console(file=StringIO(), width=28)
    print_runs(tmp_path, console)
    assert re.search(r"ab +│ finished │ 2 of", console.file.getvalue())  # type: ignore[attr-defined]


def test_the_command(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "a", 0.5)
    made(tmp_path / "runs" / "b", 0.52, steps=1, seed=1)
    damaged = made(tmp_path / "runs" / "c", 0.5)
    (damaged / "metrics.jsonl").write_text("{\n{}\n")
    listed = whet("runs", str(tmp_path / "runs"))
    assert listed.returncode == 0, listed.stderr
    for text in ("finished", "stopped", "damaged", "1 of 2", "20.0%"):
        assert text in listed.stdout
    compared = whet("runs", "compare", str(tmp_path / "runs/a"), str(tmp_path / "runs/b"))
    assert compared.returncode == 0, compared.stderr
    assert "+2.0 points" in compared.stdout
    assert "may be chance" in " ".join(compared.stdout.split())
    as_json = json.loads(whet("runs", "compare", *(str(tmp_path / "runs" / name) for name in "ab"), "--json").stdout)
    assert as_json["settings"] == {"seed": [None, 1]}
    for words, problem in (
        (["compare", str(tmp_path / "runs/a")], "compare takes two runs, and was given 1"),
        (["nowhere"], "there is no folder nowhere"),
        (["a", "b"], "to compare: whet runs compare A B"),
        (["compare", "a", "b"], "there is no such run folder"),
    ):
        failed = whet("runs", *words)
        assert failed.returncode == 2
        assert problem in failed.stderr
    assert find_runs(tmp_path / "runs" / "a") == []
    rows = json.loads(whet("runs", str(tmp_path / "runs"), "--json").stdout)
    assert [row["state"] for row in rows] == ["finished", "stopped", "damaged"]
    assert "metrics.jsonl" in rows[2]["problem"]


def test_metrics_of_a_wrong_type_are_named_and_null_ones_are_left_out(tmp_path: Path) -> None:
    """A metric that was not finite is null."""
    wrong, null = made(tmp_path / "a", 0.5), made(tmp_path / "b", 0.5)
    for run, value in ((wrong, '"high"'), (null, "null")):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": 2, "evaluation/accuracy": {value}, "time/device_hours": {value}}}\n')
    compared = whet("runs", "compare", str(null), str(wrong))
    assert (compared.returncode, compared.stdout) == (1, "")
    said = f"{wrong / 'metrics.jsonl'}:5: invalid line (evaluation/accuracy: expected a finite number, got text 'high')"
    assert compared.stderr == f"error: {said}; remove it to continue\n"
    assert RunState.of(null).summary.device_hours is None


@pytest.mark.parametrize("changed", [{"evaluation/accuracy": 1.5}, {"evaluation/accuracy": -1}, {"evaluation/n": -3}])
def test_an_impossible_accuracy_of_a_changed_file_is_compared(tmp_path: Path, changed: dict[str, float]) -> None:
    first, second = made(tmp_path / "a", 0.5), made(tmp_path / "b", 0.5)
    with (second / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "kind": "evaluation"} | changed) + "\n")
    assert compare(RunState.of(first), RunState.of(second))["accuracy"][0] == 0.5


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    made(tmp_path / "a", 0.5)
    unreadable = made(tmp_path / "b", 0.5) / "metrics.jsonl"
    unreadable.unlink()
    unreadable.mkdir()
    assert [row["state"] for row in list_runs(tmp_path)] == ["finished", "damaged"]
    console = Console(file=StringIO(), width=120)
    print_runs(tmp_path, console)
    assert "damaged: [Errno 21]" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_the_stages_of_a_pipeline_are_listed_and_long_keys_are_whole(tmp_path: Path) -> None:
    first = made(tmp_path / "a", 0.5, algorithm={"loss": {"surrogate": {"clip_high": 0.2, "clip_low": 0.2}}})
    stage = made(tmp_path / "own-tiny" / "sft", 0.5)
    made(first / "copy", 0.5)  # in the folder of a run: a part of it
    assert set(find_runs(tmp_path)) == {first, stage}
    wide, narrow = Console(file=StringIO(), width=120), Console(file=StringIO(), width=60)
    print_runs(tmp_path, wide)
    assert "own-tiny/sft" in wide.file.getvalue()  # type: ignore[attr-defined]
    print_comparison(RunState.of(first), RunState.of(stage), narrow)
    assert "…" not in narrow.file.getvalue()  # type: ignore[attr-defined]
