"""Whole runs with a hosted judge: exact resumes, the shipped recipe, and failures that are never rewards."""

import signal
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.e2e.test_resume import metrics
from tests.forks import whet
from tests.toy import toy_recipe, write_recipe
from whet.base.errors import WhetError
from whet.config import load
from whet.run import run
from whet.run.recipe import Recipe

CHOICES = {letter: float(letter in ascii_letters) for letter in ascii_letters + digits + punctuation}


def judged(model: Path, **changes: Any) -> dict[str, Any]:
    """Data that a tiny judge of random weights rewards."""
    judge = {"model": str(model), "verdict": "logprobs", "max_tokens": 8}
    data = {"type": "judge", "judge": judge, "by": "choice", "choices": CHOICES, "template": "{answer}"}
    return {**data, "taskset": {"type": "tests.toy:Lowercase"}, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("in_workers", [False, True])
def test_a_killed_run_with_a_hosted_judge_resumes_to_the_same_bits(
    tiny_model: Path, tmp_path: Path, in_workers: bool
) -> None:
    data = judged(tiny_model)
    if in_workers:
        data = {"type": "workers", "processes": 1, "taskset": data}
    made = toy_recipe(tiny_model, steps=4, data=data, checkpoints={"every": 2}, evaluation={"every": 2})
    recipe = write_recipe(tmp_path / "toy.yaml", made)
    done = whet("train", str(recipe), "--folder", str(tmp_path / "undisturbed"))
    assert done.returncode == 0, done.stderr
    killed = whet("train", str(recipe), "--folder", str(tmp_path / "run"), WHET_CRASH_AT="step.updated:4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = whet("resume", str(tmp_path / "run"))
    assert resumed.returncode == 0, resumed.stderr
    whole = metrics(tmp_path / "undisturbed")
    assert metrics(tmp_path / "run") == whole
    rewards = {line["reward/mean"] for line in whole if "reward/mean" in line}
    assert len(rewards) == 4


@pytest.mark.usefixtures("forked_children")
def test_the_recipe_runs_two_steps_and_the_rule_watches(tiny_model: Path, tmp_path: Path) -> None:
    changes = [f"model.path={tiny_model}", f"data.judge.model={tiny_model}", "steps=2", "sinks=[jsonl]"]
    changes += ["learner.precision=float32", "generator.dtype=float32", "rollouts.prompts_per_step=2"]
    changes += ["sampling.max_new_tokens=8", "algorithm.group_size=2", "evaluation.limit=2"]
    recipe = load(Recipe, "judge-quickstart", changes).value
    choices = recipe.data.model_copy(update={"choices": CHOICES, "may_name_choice": True, "gate": None})
    trained = lines(run.start(recipe.model_copy(update={"data": choices}), tmp_path / "run"), "train")[1:]
    assert len(trained) == 2
    assert all(0 < line["reward/mean"] < 1 for line in trained)
    assert all({"scores/grade", "scores/tone", "scores/distinct", "accuracy"} <= line.keys() for line in trained)


@pytest.mark.usefixtures("forked_children")
def test_a_run_whose_judge_never_chooses_trains_on_nothing(tiny_model: Path, tmp_path: Path) -> None:
    data = judged(tiny_model, choices={"Negative": 1.0, "Positive": 0.0})
    data["judge"] |= {"retries": 0}
    recipe = toy_recipe(tiny_model, steps=1, data=data, rollouts={"retries": 0}, evaluation={"enabled": False})
    with pytest.raises(WhetError, match="none of Negative, Positive is among the likeliest first tokens"):
        run.start(recipe, tmp_path / "run")
    assert [line for line in metrics(tmp_path / "run") if "reward/mean" in line] == []
