"""Every algorithm in a whole run: the family for two steps, PPO until it has learned, the recipes that come along."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.grids import taking_turns
from tests.rows import labelled, pairs, texts, write_rows
from tests.toy import Lowercase, toy_recipe
from whet.base.errors import ConfigError
from whet.config import load
from whet.core.types import Task
from whet.run import run
from whet.run.recipe import Recipe


class ShareAsScore(Lowercase):
    """The reward is a score as well, so that it can be a component."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        scores = await super().grade(task, answer)
        return scores | {"share": scores["reward"]}


class SomeTasksAreEqual(Lowercase):
    """The answers to the first three tasks are all worth the same."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        equal = task.uid.startswith("toy/train/") and task.uid[-2:] in ("/0", "/1", "/2")
        return {"reward": 0.0, "correct": 0.0} if equal else await super().grade(task, answer)


FAMILY = ["dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "gdpo", "ppo", "prime"]
FAMILY += ["max_rl", "sapo", "gmpo", "dppo", "m2po", "clip_cov", "kl_cov"]


# The others only have another loss or advantage: test_objectives.py computes these with a real learner.
DIFFERENT = ("dapo", "gdpo", "ppo", "prime", "max_rl", "kl_cov")


@pytest.mark.parametrize("name", taking_turns(FAMILY, DIFFERENT))
def test_two_steps_of(name: str, tiny_model: Path, tmp_path: Path) -> None:
    algorithm: dict[str, Any] = {"type": name, "minibatches": 3}
    if name == "gdpo":  # a random model is rarely more than half right
        algorithm["advantage"] = {"components": {"correct": 0.5, "share": 0.5}}
    if name == "prime":  # for the same reason nothing would pass its filter
        algorithm["filters"] = []
    data = {"type": "tests.e2e.test_algorithms:ShareAsScore"}
    changes: dict[str, Any] = {"evaluation": {"enabled": False}, "checkpoints": {"every": 0}}
    recipe = toy_recipe(tiny_model, steps=2, data=data, algorithm=algorithm, **changes)
    trained = lines(run.start(recipe, tmp_path / "run"), "train")[1:]
    assert [line["learner/skipped"] for line in trained] == [0, 0]
    assert all(line["gradient_norm"] > 0 for line in trained)
    assert ("critic/loss" in trained[-1]) == (name == "ppo")
    assert ("implicit_reward/outcome/accuracy" in trained[-1]) == (name == "prime")


@pytest.mark.slow
def test_ppo_learns_the_toy_task_with_a_critic(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"type": "ppo", "group_size": 4, "minibatches": 3, "critic_warmup": 2, "critic_lr": 5e-3}
    recipe = toy_recipe(tiny_model, steps=18, algorithm=algorithm, checkpoints={"every": 0})
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    trained = lines(folder, "train")[1:]
    assert ["loss" in line for line in trained[:4]] == [False, False, True, True]
    assert all("critic/loss" in line and "value/explained_variance" in line for line in trained)
    assert trained[-1]["critic/value/squared_error"] < trained[0]["critic/value/squared_error"]
    assert {path.name for path in (folder / "checkpoints" / "step-000018").iterdir()} >= {"policy", "critic"}


@pytest.mark.slow
def test_online_dpo_learns_the_toy_task_and_counts_what_it_drops(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"type": "online_dpo", "group_size": 4, "loss": {"type": "dpo", "beta": 0.1}}
    data = {"type": "tests.e2e.test_algorithms:SomeTasksAreEqual"}
    recipe = toy_recipe(tiny_model, steps=15, algorithm=algorithm, data=data, checkpoints={"every": 0})
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    trained = lines(folder, "train")[1:]
    assert trained[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "at first policy and reference are the same"
    assert all(0 <= line["preference/accuracy"] <= 1 for line in trained)
    assert {line["groups/kept"] for line in trained} == {3}
    assert sum(line["groups/dropped"] for line in trained) > 0
    assert len((folder / "rollouts" / "step-000001.jsonl").read_text().splitlines()) == 6


PRIME = {"type": "prime", "group_size": 4, "filters": []}


@pytest.mark.slow
def test_prime_learns_the_toy_task_with_a_reward_model_that_learns_beside_it(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, steps=18, algorithm=PRIME, checkpoints={"every": 0})
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    trained = lines(folder, "train")[1:]
    assert trained[0]["implicit_reward/loss"] == pytest.approx(math.log(2), abs=1e-5), "it starts as its own reference"
    losses = [line["implicit_reward/loss"] for line in trained]
    assert sum(losses[-10:]) / 10 < math.log(2)
    assert all(line["implicit_reward/gradient_norm"] > 0 for line in trained)


def test_prime_may_take_another_model_as_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_qwen3, tiny_tokenizer

    tiny_qwen3().save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    algorithm = PRIME | {"reward_model": {"path": str(tmp_path / "other")}}
    recipe = toy_recipe(tiny_model, steps=2, algorithm=algorithm, evaluation={"enabled": False})
    last = lines(run.start(recipe, tmp_path / "run"), "train")[-1]
    assert last["implicit_reward/gradient_norm"] > 0
    saved = tmp_path / "run" / "checkpoints" / "step-000002" / "implicit_reward"
    assert saved.is_dir()


@pytest.mark.parametrize(
    ("algorithm", "second"),
    [
        ({"type": "ppo", "group_size": 2, "minibatches": 3}, "critic"),
        pytest.param(PRIME, "implicit_reward", marks=pytest.mark.slow),
    ],
    ids=["ppo", "prime"],
)
def test_a_run_resumes_with_its_second_model(
    algorithm: dict[str, Any], second: str, tiny_model: Path, tmp_path: Path
) -> None:
    def settings(steps: int) -> Recipe:
        return toy_recipe(tiny_model, steps=steps, algorithm=algorithm, evaluation={"enabled": False})

    def weights(folder: Path) -> list[bytes]:
        step = folder / "checkpoints" / "step-000003"
        return [(step / role / "model.safetensors").read_bytes() for role in ("policy", second)]

    whole = run.start(settings(3), tmp_path / "whole")
    halves = run.start(settings(2), tmp_path / "halves")
    run.resume(halves, ["steps=3"])
    assert weights(halves) == weights(whole)
    with pytest.raises(ConfigError, match=rf"step-000003/{second} has weights of a model that this recipe"):
        run.resume(halves, ["steps=4", "algorithm=grpo"])


SHIPPED = [
    "sft-gsm8k",
    "dpo-gsm8k",
    "kto-gsm8k",
    "reward-model-gsm8k",
    "ppo-quickstart",
    "online-dpo-quickstart",
    "rlhf-reward-model",
]
DISTILLATION = ["distillation-quickstart", "distillation-gsm8k"]
# These differ from others, or from runs of the family, by settings only, and take turns.
RELATED = ["simpo-gsm8k", "orpo-gsm8k"]
RELATED += [
    f"{name}-quickstart"
    for name in ("dr-grpo", "dapo", "gspo", "cispo", "prime", "rloo", "reinforce-plus-plus", "gdpo")
]


@pytest.mark.parametrize(
    "name", [*SHIPPED, *DISTILLATION, *(pytest.param(name, marks=pytest.mark.slow) for name in RELATED)]
)
def test_a_recipe_that_comes_along_runs_two_steps(name: str, tiny_model: Path, tmp_path: Path) -> None:
    changes = [f"model.path={tiny_model}", "steps=2", "sinks=[jsonl]", "learner.precision=float32"]
    if name.endswith("quickstart"):
        changes += ["generator.dtype=float32", "evaluation.limit=2", "rollouts.prompts_per_step=2"]
        changes += ["sampling.max_new_tokens=8", "sampling.max_prompt_tokens=1000", "algorithm.group_size=2"]
        changes += ["data.type=tests.toy:Lowercase"] if name == "online-dpo-quickstart" else ["data.test_size=4"]
    if name == "ppo-quickstart":
        changes += ["algorithm.minibatches=2", "algorithm.critic_warmup=1"]
    if name in ("dapo-quickstart", "prime-quickstart"):  # a random model is never right, so no group would be kept
        changes += ["algorithm.filters=[overlong_filter]"]
    if name in DISTILLATION:
        changes += [f"algorithm.teachers.tutor.path={tiny_model}"]
    if name in ("sft-gsm8k", "distillation-gsm8k"):
        rows = [{"question": row["prompt"], "answer": row["completion"]} for row in texts(48)]
        changes += [f"data.path={write_rows(tmp_path / 'train.jsonl', rows[:40])}"]
        changes += [f"data.test_path={write_rows(tmp_path / 'test.jsonl', rows[40:])}"]
    elif name == "kto-gsm8k":
        changes += [f"data.path={write_rows(tmp_path / 'labelled.jsonl', labelled(20))}"]
    elif not name.endswith("quickstart"):
        changes += [f"data.path={write_rows(tmp_path / 'pairs.jsonl', pairs(40))}"]
    folder = run.start(load(Recipe, name, changes).value, tmp_path / "run")
    assert [line["step"] for line in lines(folder, "train")] == [0, 1, 2]
    assert len(lines(folder, "evaluation")) == 2
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
