"""Whole runs in which an unchanged program, written for OpenAI's API, drives the episodes."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.toy import toy_recipe
from whet.metrics.rollout_file import read_rollouts
from whet.rollouts.audit import audit
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


@pytest.mark.parametrize(
    ("program", "branches", "replies", "context", "steps"),
    [
        ("summarising", 3, 4, 512, 2),
        pytest.param("summarising_for_long", 6, 50, 2048, 1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_a_session_with_summaries_is_one_answer_of_several_branches(
    program: str, branches: int, replies: int, context: int, steps: int, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = toy_recipe(
        tiny_model,
        steps=steps,
        checkpoints={"every": 1},
        data={
            "type": "agent",
            "program": f"tests.endpoint.programs:{program}",
            "taskset": "tests.toy:Lowercase",
            "deadline": 1500.0,
        },
        sampling={
            "max_new_tokens": 4,
            "max_prompt_tokens": 96,
            "max_turns": branches * replies,
            "max_episode_tokens": context,
        },
        algorithm={"type": "grpo", "group_size": 2, "filters": []},
        rollouts={"prompts_per_step": 2},
        generator={"max_context": context, "prefix_tokens": 2 * context},
        learner={"max_tokens": 4 * context},
        evaluation={"enabled": False},
    )
    folder = run.start(recipe, tmp_path / "run")
    for line in lines(folder, "train")[1:]:
        assert line["mismatch/token_mult_prob_error"] < 1.0001
        assert (line["episode/turns"], line["episode/branches"]) == (branches * replies, branches)
    for step in range(1, steps + 1):
        records = list(read_rollouts(folder, step))
        assert len(records) == 2 * 2 * branches
        for record in records:
            assert len(record.turns) == replies
            if record.learner_logprobs is not None:  # it had a gradient
                assert record.learner_logprobs == pytest.approx(record.logprobs, abs=1e-4)
        rewards = {(record.uid, record.sample): set[float | None]() for record in records}
        for record in records:
            rewards[record.uid, record.sample].add(record.reward)
        assert [len(values) for values in rewards.values()] == [1] * 4, "branches share the reward"
    found = audit(folder)
    assert (found.violations, found.step) == ([], steps)
    assert sum(counts["trained"] for counts in found.by_epoch().values()) == 2 * steps
