"""Scores that a task set declares: a grade has no others, and a recipe names no others."""

import asyncio
import json
import math
from typing import Any, ClassVar

import pytest

from tests.tasks.built_in import BUILT_IN
from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.presets import GDPO
from whet.base.errors import DataError
from whet.config import load
from whet.config.issues import RecipeError
from whet.core.types import Task
from whet.run.recipe import Recipe
from whet.tasks.base import TaskSet
from whet.tasks.episodes import graded, play
from whet.tasks.scores import NamedScore, NamedScores

TASK: Task = Task("polite/0", [{"role": "user", "content": "hi"}])


class Polite(TaskSet):
    named_scores: ClassVar[NamedScores] = {
        "correct": NamedScore(weight=1.0),
        "polite": NamedScore(weight=0.2),
        "words": NamedScore(high=math.inf),
    }

    def tasks(self, split: str) -> list[Task]:
        return [TASK] if split == "train" else []

    def grade(self, task: Task, answer: str) -> dict[str, float]:
        scores: dict[str, float] = json.loads(answer)
        return scores


def grade(answer: dict[str, float]) -> dict[str, float]:
    return asyncio.run(graded(Polite(), TASK, json.dumps(answer)))


def test_the_reward_of_a_grade_without_one_is_the_sum_by_the_declared_weights() -> None:
    scores = grade({"correct": 1, "polite": 0.5, "words": 70})
    assert scores == {"reward": 1.1, "correct": 1, "polite": 0.5, "words": 70}
    assert grade({"reward": 0.25, "correct": 1.0})["reward"] == 0.25


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"reward": 1.0, "polit": 1.0}, r"score 'polit', which .* \(correct, polite, words\)\. Did you mean 'polite'"),
        ({"reward": 1.0, "polite": 1.5}, r"Polite\.grade .*'polite/0' returned .* polite = 1\.5; .* from 0 to 1"),
        ({"reward": 1.0, "words": -1.0}, r"the score words = -1; it is declared from 0 to inf"),
        ({"correct": 1.0, "words": 3.0}, r"must return the reward, or a dict with the key 'reward'"),
    ],
)
def test_a_grade_that_is_not_as_declared_is_an_error(answer: dict[str, float], error: str) -> None:
    with pytest.raises(DataError, match=error):
        grade(answer)


@pytest.mark.parametrize("taskset", BUILT_IN, ids=lambda taskset: type(taskset).__name__)
def test_built_in_episodes_have_declared_scores_only(taskset: TaskSet) -> None:
    async def played() -> set[str]:
        environments, names = taskset.open(), set[str]()
        try:
            for case in list(taskset.cases())[:4]:
                _, step = await play(environments.make(case.task), case.answer)
                names |= step.scores.keys()
        finally:
            await environments.close()
        return names

    names = asyncio.run(played())
    assert names
    assert not taskset.score_names or names <= set(taskset.score_names)


AGENT = "{type: agent, program: [sh], taskset: {type: repositories}}"
JUDGED = "{type: judge, taskset: {type: arithmetic}, judge: {model: m, url: 'http://h'}}"
REWARDED = "{type: reward_model, taskset: {type: arithmetic}, model: m}"
GATE: dict[str, Any] = {"type": "gate", "when": {"type": "score", "name": "corect"}, "then": {"type": "score"}}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["rewards={type: score, name: formt}"], "rewards: .* has no score 'formt', only .*Did you mean 'format'"),
        ([f"rewards={json.dumps(GATE)}"], "rewards: .* has no score 'corect', only .*Did you mean 'correct'"),
        (["algorithm=gdpo", "algorithm.advantage.components={formt: 1.0}"], "components of GDPO: .*no score 'formt'"),
        (["algorithm=gdpo", "algorithm.advantage.components={overlong: 1.0}"], "no score 'overlong'"),
        (
            ["data={type: blend, of: {a: {taskset: {type: calculator}, rewards: {type: score, name: calls}}}}"],
            "rewards: calculator has no score 'calls', only .*tool_calls",
        ),
        (["data={type: shell}", "rewards={type: score, name: unreadable}"], "only .*Did you mean 'shell_unreadable'"),
        (["data={type: repositories}", "rewards={type: score, name: fail_to_pas}"], "Did you mean 'fail_to_pass'"),
        (
            [f"data={AGENT}", "rewards={type: score, name: tool_calls}"],
            "has no score 'tool_calls', only .*fail_to_pass",
        ),
        (["data={type: openenv, url: 'ws://h'}", "rewards={type: score, name: malformed}"], "'malformed_action'"),
        (["data={type: task_folders, path: x}", "rewards={type: score, name: noreward}"], "Did you mean 'no_reward'"),
        ([f"data={JUDGED}", "rewards={type: score, name: judget}"], "only .*Did you mean 'judged'"),
        ([f"data={REWARDED}", "rewards={type: score, name: rewardmodel}"], "only .*Did you mean 'reward_model'"),
    ],
)
def test_a_mistyped_score_is_an_error_when_the_recipe_is_read(changes: list[str], error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        load(Recipe, "quickstart", changes)


LENGTH = "{type: length, free: 5, limit: 9}"


@pytest.mark.parametrize(
    "changes",
    [
        ["rewards={type: sum, of: {task: {type: score}, form: {type: score, name: format, weight: 0.1}}}"],
        [
            f"rewards={{type: sum, of: {{task: {{type: score}}, brevity: {LENGTH}}}}}",
            "algorithm=gdpo",
            "algorithm.advantage.components={graded: 1.0, rewards/brevity: -1.0}",
        ],
        ["data={type: calculator}", "rewards={type: score, name: tool_errors, weight: -0.1}"],
        ["data=tests.toy:Lowercase", "rewards={type: score, name: anything}"],
        [
            "algorithm=gdpo",
            "algorithm.filters=[{type: overlong_shaping, limit: 9, buffer: 4}]",
            "algorithm.advantage.components={correct: 1.0, overlong: 1.0}",
        ],
    ],
    ids=["declared", "composed", "counted", "of a task set that declares none", "of a filter"],
)
def test_scores_that_there_can_be_are_accepted(changes: list[str]) -> None:
    load(Recipe, "quickstart", changes)


@pytest.mark.parametrize("path", ["components={format: 1.0}", "components.format=1.0"])
def test_gdpo_learns_from_the_components_of_a_recipe_alone(path: str) -> None:
    algorithm = load(Recipe, "quickstart", ["algorithm=gdpo", f"algorithm.advantage.{path}"]).value.algorithm
    assert algorithm.estimator == GDPOAdvantage(components={"format": 1.0})
    assert GDPO.estimator == GDPOAdvantage()
    assert GDPOAdvantage().weights == {"correct": 1.0}
