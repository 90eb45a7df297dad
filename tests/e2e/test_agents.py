"""Whole runs in which an unchanged program, written for OpenAI's API, drives the episodes."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.toy import toy_recipe
from whet.metrics.rollout_file import read_rollouts
from whet.run import run

SETTINGS: dict[str, Any] = {
    "checkpoints": {"every": 0},
    "data": {"type": "agent", "program": "tests.endpoint.programs:team", "taskset": "tests.toy:Lowercase"},
    "sampling": {"max_new_tokens": 8, "max_prompt_tokens": 96, "max_turns": 4, "max_observation_tokens": 40},
}


def test_each_call_of_an_agent_is_trained_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=1, **SETTINGS), tmp_path / "run")
    for line in lines(folder, "train")[1:]:
        assert line["mismatch/token_mult_prob_error"] < 1.0001
    records = list(read_rollouts(folder, 1))
    assert len(records) == 3 * 4 * 2, "two branches of each episode"
    for own, sub in zip(records[::2], records[1::2], strict=True):
        assert own.reward == sub.reward
        assert own.learner_logprobs == pytest.approx(own.logprobs, abs=1e-4)


@pytest.mark.slow
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
        ),
    ],
)
def test_an_agent_with_a_sub_agent_learns(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=20, **SETTINGS, **changes), tmp_path / "run")
    # Of sampled answers: the greedy one of so small a model is all right or all wrong.
    rewards = [line["reward/mean"] for line in lines(folder, "train") if "reward/mean" in line]
    assert sum(rewards[-5:]) > 1.25 * sum(rewards[:5])
