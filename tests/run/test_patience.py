"""A run ends when evaluations no longer improve, with its best weights kept, also when it is killed and resumed."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import metrics
from tests.forks import whet
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.base.errors import ConfigError
from whet.checkpoint.store import CheckpointStore
from whet.core.types import Task
from whet.run.evaluation import EvaluationConfig
from whet.run.patience import Patience
from whet.run.run import resume, start
from whet.run.steps import Run
from whet.show.runs import RunState

NAME = "evaluation/accuracy"


def test_evaluations_without_a_better_value_are_counted() -> None:
    patience = Patience(2, NAME, "max")
    kept = [patience.measure(step, {NAME: value}) for step, value in enumerate([0.2, 0.2, 0.3, math.nan, 0.1])]
    assert kept == [True, False, True, False, False]
    assert patience.over
    assert "was best at step 2 (0.3) and has not improved in 2 evaluations" in str(patience)
    assert not patience.measure(9, {})
    assert patience.waited == 2
    again = Patience(3, NAME, "max")
    again.load_state(patience.state())
    assert not again.over
    assert again.measure(6, {NAME: 0.4})


def test_smaller_may_be_better() -> None:
    patience = Patience(2, "evaluation/loss", "min")
    assert [patience.measure(step, {"evaluation/loss": value}) for step, value in enumerate([2, 1, 3])] == [
        True,
        True,
        False,
    ]


def test_without_patience_nothing_is_counted() -> None:
    patience = Patience(0, NAME, "max")
    assert not patience.measure(1, {"evaluation/loss": 1.0})
    assert not patience.over


def test_what_patience_needs_is_said() -> None:
    with pytest.raises(ConfigError, match=f"best_metric = {NAME}, which is not measured; measured are: evaluation/x"):
        Patience(1, NAME, "max").measure(1, {"evaluation/x": 1.0})
    with pytest.raises(ValueError, match=r"set evaluation\.every"):
        EvaluationConfig(patience=1)


class Hopeless(Lowercase):
    """No answer is right."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return await super().grade(task, answer) | {"correct": 0.0}


SECTIONS: dict[str, Any] = {
    "steps": 12,
    "data": {"type": "tests.run.test_patience:Hopeless"},
    "evaluation": {"every": 1, "patience": 3},
    "checkpoints": {"every": 2, "keep_last": 1},
}


def test_the_best_weights_are_kept(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scripted(self: Run, step: int) -> dict[str, float]:
        return {NAME: {0: 0.1, 1: 0.5}.get(step, 0.2)}

    monkeypatch.setattr(Run, "_evaluate", scripted)
    folder = start(toy_recipe(tiny_model, **SECTIONS), tmp_path / "run")
    store = CheckpointStore(folder / "checkpoints")
    assert store.steps() == [1, 4]
    assert store.load("best").step == 1
    assert "was best at step 1 (0.5) and has not improved in 3 evaluations" in (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(toy_recipe(tiny_model, **SECTIONS), tmp_path_factory.mktemp("patience") / "run")


def steps(folder: Path) -> int:
    return max(line["step"] for line in metrics(folder))


@pytest.mark.slow
@pytest.mark.parametrize("crash_at", ["step.logged:3", "checkpoint.before_prune:2"])
def test_a_killed_run_ends_at_the_same_step(ended: Path, tiny_model: Path, tmp_path: Path, crash_at: str) -> None:
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, **SECTIONS))
    killed = whet("train", str(recipe), "--folder", str(tmp_path / "run"), WHET_CRASH_AT=crash_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = whet("resume", str(tmp_path / "run"))
    assert resumed.returncode == 0, resumed.stderr
    assert "the run ends at step 3 of 12" in resumed.stderr
    assert "evaluation.patience=0" in resumed.stderr
    assert metrics(tmp_path / "run") == metrics(ended)
    assert RunState.of(tmp_path / "run").state == "finished"


def test_a_run_that_ended_trains_for_longer_with_more_patience(ended: Path) -> None:
    before = metrics(ended)
    assert (steps(ended), RunState.of(ended).state) == (3, "finished")
    resume(ended)
    assert metrics(ended) == before
    resume(ended, ["evaluation.patience=0", "steps=4"])
    assert (steps(ended), RunState.of(ended).state, RunState.of(ended).facts.steps) == (4, "finished", 4)
