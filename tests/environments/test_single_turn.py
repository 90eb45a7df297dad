"""One prompt, one reply, one grade; a broken grade is an error, never a silent zero."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest

from tests.toy import toy_recipe
from whet.environments.base import Environment, TaskSet
from whet.environments.single_turn import SingleTurn
from whet.errors import ConfigError, DataError
from whet.types import Task

TASK = Task("toy/train/3", [{"role": "user", "content": "2 + 2?"}])


class Toy(TaskSet):
    grade_with: object = None

    def tasks(self, split):
        return [TASK]

    async def grade(self, task, answer):
        return {"reward": self.grade_with, "length": len(answer)} if self.grade_with != "no dict" else 1.0


def step(value):
    return asyncio.run(Toy(grade_with=value).make(TASK).step({"role": "assistant", "content": "four"}))


def test_an_episode_is_the_prompt_and_one_graded_step():
    episode = Toy(grade_with=0.5).make(TASK)
    assert isinstance(episode, Environment)
    assert isinstance(episode, SingleTurn)
    assert asyncio.run(episode.start()).messages == TASK.prompt
    done = step(0.5)
    assert (done.reward, done.done, done.scores) == (0.5, True, {"length": 4.0})
    asyncio.run(episode.close())


@pytest.mark.parametrize("value", [1, 0.25, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_any_finite_number_is_a_reward(value):
    assert step(value).reward == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", True, np.bool_(True), [1.0], "no dict"])
def test_a_reward_that_is_no_finite_number_is_an_error_naming_task_and_environment(value):
    with pytest.raises(DataError, match=r"Toy.*toy/train/3"):
        step(value)


def test_scores_without_a_reward_are_an_error():
    class Forgetful(Toy):
        async def grade(self, task, answer):
            return {"correct": 1.0}

    with pytest.raises(DataError, match="'reward'"):
        asyncio.run(Forgetful().make(TASK).step({"role": "assistant", "content": ""}))


def test_a_task_set_that_only_poses_tasks_needs_somebody_to_reward_its_answers(tmp_path):
    poses = "tests.environments.test_reward_model:Poses"
    with pytest.raises(ConfigError, match=rf"data is {poses}, which only poses tasks.*grade\(\) or make\(\)"):
        toy_recipe(tmp_path, data={"type": poses})
    recipe = toy_recipe(tmp_path, data={"type": "reward_model", "model": "judge", "taskset": poses})
    assert not recipe.data.taskset.grades
    with pytest.raises(ConfigError, match=r"Poses has no grade\(\)"):
        asyncio.run(recipe.data.taskset.make(TASK).step({"role": "assistant", "content": ""}))


def test_a_task_set_without_tasks_cannot_be_made():
    class Aimless(TaskSet):
        async def grade(self, task, answer):
            return {"reward": 1.0}

    with pytest.raises(TypeError, match=r"Aimless.*tasks"):
        Aimless()
