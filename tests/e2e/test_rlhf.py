"""The whole way of RLHF with a tiny model: scored answers, a reward model, its export, a policy that learns from it."""

import random
from pathlib import Path
from string import ascii_lowercase

import pytest

from tests.e2e.test_learning import lines
from tests.forks import whet
from tests.rows import rows_recipe, write_rows
from tests.toy import toy_recipe
from whet.base.errors import WhetError
from whet.checkpoint.export import export
from whet.config import load
from whet.run import run
from whet.run.recipe import Recipe

OTHER = "0123456789 .,;:!?()[]{}<>+-*/=#%&$@ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def judge(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that has learned from examples what share of a text is lower-case letters, exported."""
    folder = tmp_path_factory.mktemp("judge")
    dice, rows = random.Random(0), []
    for i in range(300):
        share = dice.random()
        text = "".join(dice.choice(ascii_lowercase if dice.random() < share else OTHER) for _ in range(8))
        score = sum(letter in ascii_lowercase for letter in text) / 8
        rows.append({"prompt": f"{'re'[i % 2]}{i % 12} write letters", "completion": text, "score": score})
    path = write_rows(folder / "scored.jsonl", rows)
    algorithm = {"type": "reward_model", "loss": "score_regression"}
    changes = {"steps": 60, "checkpoints": {"every": 60}}
    trained = run.start(rows_recipe(tiny_model, "scored", path, algorithm, **changes), folder / "judge-run")
    export(trained, folder / "judge")
    return folder / "judge"


@pytest.mark.slow
def test_a_policy_learns_from_a_reward_model_and_is_measured_by_the_grader(
    tiny_model: Path, judge: Path, tmp_path: Path
) -> None:
    data = {"type": "reward_model", "taskset": {"type": "tests.toy:Lowercase"}, "model": str(judge), "clamp": 10.0}
    recipe = toy_recipe(tiny_model, steps=25, data=data, checkpoints={"every": 25})
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    assert after["evaluation/accuracy"] > before["evaluation/accuracy"]
    trained = lines(folder, "train")[1:]
    assert trained[-1]["scores/grade"] > trained[0]["scores/grade"]
    assert all(line["reward/mean"] == pytest.approx(line["scores/reward_model"], abs=1e-6) for line in trained)
    assert all(0 <= line["accuracy"] <= 1 for line in trained)
    scored = whet("eval", str(folder), "--json")
    assert scored.returncode == 0, scored.stderr
    assert '"accuracy"' in scored.stdout


@pytest.mark.usefixtures("forked_children")
def test_a_run_stops_with_an_error_if_its_reward_model_can_not_be_loaded(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "reward_model", "taskset": {"type": "tests.toy:Lowercase"}, "model": str(tiny_model)}
    with pytest.raises(WhetError, match="is not a reward model"):
        run.start(toy_recipe(tiny_model, steps=2, data=data), tmp_path / "run")


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("name", ["rlhf-quickstart", pytest.param("rlhf-gsm8k", marks=pytest.mark.slow)])
def test_a_recipe_that_comes_along_runs_two_steps(name: str, tiny_model: Path, judge: Path, tmp_path: Path) -> None:
    changes = [f"model.path={tiny_model}", f"data.model={judge}", "steps=2", "sinks=[jsonl]", "evaluation.limit=2"]
    changes += ["learner.precision=float32", "generator.dtype=float32", "rollouts.prompts_per_step=2"]
    changes += ["sampling.max_new_tokens=8", "sampling.max_prompt_tokens=1000", "algorithm.group_size=2"]
    if name == "rlhf-gsm8k":
        rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(20)]
        changes += [f"data.taskset.path={write_rows(tmp_path / 'train.jsonl', rows)}", "data.taskset.test_size=4"]
    trained = lines(run.start(load(Recipe, name, changes).value, tmp_path / "run"), "train")[1:]
    assert len(trained) == 2
    assert all(line["reward/mean"] == pytest.approx(line["scores/reward_model"]) for line in trained)


def test_the_recipe_poses_the_tasks_of_the_quickstart() -> None:
    assert load(Recipe, "rlhf-quickstart").value.data.taskset == load(Recipe, "quickstart").value.data
