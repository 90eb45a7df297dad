"""Whole runs with a tiny random model: it learns, in step and out of step, fully and by LoRA."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.toy import Lowercase, toy_recipe
from whet.base.errors import WhetError
from whet.core.types import Task
from whet.metrics.rollout_file import read_rollouts
from whet.metrics.sinks.jsonl import read_metrics
from whet.rollouts.audit import audit
from whet.run import run


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="in step"),
        pytest.param(
            {
                "rollouts": {"prompts_per_step": 3, "max_staleness": 1},
                "algorithm": {"type": "grpo", "group_size": 4, "loss": {"type": "policy", "correction": "tis"}},
            },
            id="one step off",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"algorithm": {"type": "grpo", "group_size": 4, "minibatches": 3, "epochs": 2}},
            id="epochs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tiny_model_learns_the_toy_task(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=30, checkpoints={"every": 0}, **changes), tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    rewards = [line["reward/mean"] for line in lines(folder, "train")[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.slow
def test_lora_learns_with_the_base_model_as_reference(tiny_model: Path, tmp_path: Path) -> None:
    changes = {
        "model": {"lora": {"rank": 8, "alpha": 32.0}},
        "optimizer": {"lr": 3e-3},
        "algorithm": {"type": "grpo", "group_size": 4, "loss": {"type": "policy", "kl": {"coefficient": 1e-3}}},
    }
    folder = run.start(toy_recipe(tiny_model, steps=30, checkpoints={"every": 0}, **changes), tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2
    kl = [line["kl"] for line in lines(folder, "train")[1:]]
    assert kl[0] == 0, "before the first step policy and reference are the same"
    assert kl[-1] > 0


def test_stale_rollouts_are_never_older_than_allowed(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"rollouts": {"prompts_per_step": 2, "max_staleness": 2}}
    folder = run.start(toy_recipe(tiny_model, steps=8, **changes), tmp_path / "run")
    staleness = [line["staleness/max"] for line in lines(folder, "train")[1:]]
    assert max(staleness) <= 2
    assert max(staleness) > 0, "nothing ran ahead"


def test_partial_rollouts_are_counted_once_and_the_learner_works_alone(tiny_model: Path, tmp_path: Path) -> None:
    rollouts = {"prompts_per_step": 2, "max_staleness": 1, "order": "ready", "partial": True}
    folder = run.start(toy_recipe(tiny_model, steps=6, rollouts=rollouts, data={"size": 5}), tmp_path / "run")
    found = audit(folder)
    assert not found.violations
    assert sum(counts["trained"] for counts in found.by_epoch().values()) == 12
    trained = lines(folder, "train")[1:]
    assert max(line["staleness/max"] for line in trained) <= 1
    assert all(0 <= line[f"idle/{who}"] <= 1 for line in trained for who in ("learner", "generator"))
    assert all(line["tokens/goodput"] == 1 for line in trained)


def test_in_step_sampler_and_learner_agree_in_float32(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=3), tmp_path / "run")
    for line in lines(folder, "train")[1:]:
        assert line["mismatch/token_mult_prob_error"] < 1.0001
        assert line["refit/probe_mean"] < 1e-4


def test_a_run_folder_has_its_documented_files(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=2), tmp_path / "run")
    there = {path.name for path in folder.iterdir()}
    assert lines(folder, "train")[-1].keys() >= {"entropy/approximate", "mismatch/kl"}, "what the alarms watch"
    assert {"recipe.yaml", "metrics.jsonl", "rollouts", "checkpoints", "log.txt"} <= there
    first = json.loads((folder / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    assert first["learner_logprobs"] == pytest.approx(first["logprobs"], abs=1e-4)
    assert len(first["tokens"]) == len(first["texts"]) == len(first["logprobs"]) > 0


def test_dynamic_sampling_fills_the_step_with_groups_that_have_spread(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"type": "grpo", "group_size": 2, "filters": ["dynamic_sampling", "overlong_filter"]}
    folder = run.start(toy_recipe(tiny_model, steps=4, algorithm=algorithm), tmp_path / "run")
    trained = lines(folder, "train")[1:]
    assert all(line["groups/kept"] == 3 for line in trained)
    assert sum(line["groups/dropped"] for line in trained) > 0


def test_an_evaluation_and_a_checkpoint_are_charged_to_the_step_that_they_follow(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes = {"evaluation": {"every": 2, "limit": 2}, "checkpoints": {"every": 2}}
    train = lines(run.start(toy_recipe(tiny_model, steps=3, **changes), tmp_path / "run"), "train")
    for phase in ("time/evaluate", "time/checkpoint"):
        assert [line["step"] for line in train if line.get(phase)] == [2, 3]
    for line in train[1:]:
        phases = ("generate", "grade", "score", "learn", "publish", "evaluate", "checkpoint", "other")
        assert sum(line.get(f"time/{phase}", 0.0) for phase in phases) == pytest.approx(line["time/step"], abs=1e-6)


def test_episodes_cut_before_their_first_reply_are_counted_recorded_and_audited(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes = {"sampling": {"max_seconds": 1e-6}, "evaluation": {"enabled": False}}
    folder = run.start(toy_recipe(tiny_model, steps=2, **changes), tmp_path / "run")
    for line in lines(folder, "train")[1:]:
        assert (line["groups/kept"], line["answer/truncated"], line["reward/mean"]) == (3, 1.0, 0.0)
        assert line["learner/empty"] == 1
    records = list(read_rollouts(folder, 1))
    assert [(one.limit, one.reward, one.answer, one.tokens) for one in records] == [("seconds", 0.0, "", [])] * 12
    assert all("write letters" in one.prompt for one in records)
    assert not audit(folder).violations


class Sames(Lowercase):
    """Every answer earns the same."""

    reward: float = 0.0

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": self.reward}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (0.0, "all rewards are 0 in the 3 steps up to step 3: nothing can be learned"),
        (1.0, "all answers to a task got the same reward in the 3 steps up to step 3 (from 1 to 1 "),
    ],
)
def test_equal_rewards_are_logged_with_advice(
    tiny_model: Path, tmp_path: Path, reward: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"type": "tests.e2e.test_learning:Sames", "reward": reward}
    changes = {"data": data, "evaluation": {"enabled": False}, "checkpoints": {"every": 0}}
    folder = run.start(toy_recipe(tiny_model, steps=5, **changes), tmp_path / "run")
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "nothing can be learned" in line]
    assert len(said) == 1
    assert words in said[0]
    assert "whet view RUN" in said[0]
    assert "Do the weights of several rewards cancel each other" in said[0]
    assert words in capsys.readouterr().err


def test_a_reward_too_large_to_compute_with_ends_the_run_in_words(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"data": {"type": "tests.e2e.test_learning:Sames", "reward": 1e308}, "rollouts": {"retries": 0}}
    with pytest.raises(WhetError, match=r"is 1e\+308; it must be from -1e\+12 to 1e\+12"):
        run.start(toy_recipe(tiny_model, evaluation={"enabled": False}, **changes), tmp_path / "run")
