"""One prompt, one reply, one grade; a broken grade is an error, never a silent zero."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest

from tests.toy import toy_recipe
from whet.base.errors import ConfigError, DataError
from whet.core.types import Episode, Group, Task
from whet.tasks.base import Address, Environment, Observation, Program, Step, TaskSet
from whet.tasks.episodes import SingleTurn
from whet.tasks.isolated import IsolatedEnvironments

TASK = Task("toy/train/3", [{"role": "user", "content": "2 + 2?"}])


class Toy(TaskSet):
    grade_with: object = None

    def tasks(self, split):
        return [TASK]

    async def grade(self, task, answer):
        return {"reward": self.grade_with, "length": len(answer)}


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


@pytest.mark.parametrize("value", [1, 0.25, np.float32(0.5), np.int64(1), Fraction(1, 2), True, False, np.bool_(True)])
def test_any_finite_number_is_a_reward(value):
    assert step(value).reward == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
def test_a_reward_that_is_not_a_finite_number_is_an_error_naming_task_and_environment(value):
    with pytest.raises(DataError, match=r"Toy.*toy/train/3"):
        step(value)


def test_scores_without_a_reward_are_an_error():
    class Forgetful(Toy):
        async def grade(self, task, answer):
            return {"correct": 1.0}

    with pytest.raises(DataError, match="'reward'"):
        asyncio.run(Forgetful().make(TASK).step({"role": "assistant", "content": ""}))


def test_a_task_set_without_a_grader_needs_another_source_of_rewards(tmp_path):
    poses = "tests.tasks.test_reward_model:Poses"
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


class Plain(TaskSet):
    """A task set with plain methods, without ``async``."""

    said: object = None

    def tasks(self, split):
        return [TASK]

    def grade(self, task, answer):
        return self.said

    def score_group(self, task, group):
        group.episodes[0].reward = 0.5


def hosted(taskset, *, then=None):
    async def go():
        environments = IsolatedEnvironments(taskset)
        try:
            if then is not None:
                return await then(environments)
            episode = environments.make(TASK)
            await episode.start()
            step = await episode.step({"role": "assistant", "content": "four"})
            await episode.close()
            return step
        finally:
            await environments.close()

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("said", "reward", "scores"),
    [
        ({"reward": 1.0, "format": True}, 1.0, {"format": 1.0}),
        (0.25, 0.25, {}),
        (1, 1.0, {}),
        (True, 1.0, {"correct": 1.0}),
        (False, 0.0, {"correct": 0.0}),
        (np.bool_(True), 1.0, {"correct": 1.0}),
    ],
)
def test_a_plain_function_grades_and_may_return_the_reward_alone(said, reward, scores):
    step = hosted(Plain(said=said))
    assert (step.reward, step.scores) == (reward, scores)


@pytest.mark.parametrize(
    "said", [None, "right", [1.0], ("reward", 1.0), float("nan"), {"right": 1.0}, {"reward": 1, 3: 1}]
)
def test_an_invalid_reward_is_an_error_that_names_class_and_file(said):
    with pytest.raises(DataError, match=rf"Plain\.grade \({__file__}:\d+\) of task 'toy/train/3'"):
        hosted(Plain(said=said))


def test_a_list_of_rewards_is_answered_with_what_to_return():
    with pytest.raises(
        DataError, match=r"is \[1\.0, 0\.0\]; it must be a finite number: one number for one answer; sev"
    ):
        hosted(Plain(said=[1.0, 0.0]))


def test_a_plain_function_may_score_a_group_and_must_return_nothing():
    class Returns(Plain):
        def score_group(self, task, group):
            return [1.0]

    group = Group("0", TASK, [Episode([])])
    hosted(Plain(), then=lambda environments: environments.score_group(TASK, group))
    assert group.episodes[0].reward == 0.5
    with pytest.raises(DataError, match=r"score_group \(.*\) must set the reward of each of group.episodes"):
        hosted(Returns(), then=lambda environments: environments.score_group(TASK, group))


class Turns:
    """An episode with plain methods, which returns the given values."""

    def __init__(self, start, step):
        self.says = start, step

    def start(self):
        return self.says[0]

    def step(self, reply):
        return self.says[1]

    def close(self):
        pass


GOOD = (Observation([{"role": "user", "content": "?"}]), Step(reward=1.0))


@pytest.mark.parametrize("make_is_async", [False, True])
def test_an_episode_of_plain_methods_is_played(make_is_async):
    class Plays(Plain):
        def make(self, task):
            return Turns(*GOOD)

    class PlaysLater(Plain):
        async def make(self, task):
            return Turns(*GOOD)

    assert hosted(PlaysLater() if make_is_async else Plays()).reward == 1.0


class Prefixed(Environment):
    """Changes the prompt and the data of its task, which later episodes begin with, too."""

    def __init__(self, task):
        self.task = task

    async def start(self):
        self.task.prompt.insert(0, {"role": "system", "content": str(self.task.data["hints"].pop())})
        self.task.prompt[-1]["content"] += "!"
        return Observation(self.task.prompt)

    async def step(self, reply):
        return Step(1.0)


class Agents(Program):
    def __init__(self, task):
        self.task = task

    async def run(self, address):
        self.task.prompt.append({"role": "assistant", "content": "done"})
        return Step(float(len(self.task.prompt)))


def test_an_episode_that_changes_its_task_does_not_change_the_next_one():
    class Changes(Plain):
        def make(self, task):
            return Prefixed(task)

    class Runs(Plain):
        def program_for(self, task):
            return Agents(task)

    def first(task):
        async def started(environments):
            return [(await environments.make(task).start()).messages for _ in range(2)]

        return hosted(Changes(), then=started)

    task = Task("toy/train/4", [{"role": "user", "content": "Go"}], {"hints": ["a", "b"]})
    seen = first(task)
    assert seen == [[{"role": "system", "content": "b"}, {"role": "user", "content": "Go!"}]] * 2
    assert task == Task("toy/train/4", [{"role": "user", "content": "Go"}], {"hints": ["a", "b"]})

    async def ran(environments):
        return [(await environments.program_for(task).run(Address("", ""))).reward for _ in range(2)]

    assert hosted(Runs(), then=ran) == [2.0, 2.0]


class Yields(Turns):
    """An episode whose ``close`` contains ``yield``."""

    def close(self):
        yield


def test_a_function_that_yields_is_an_error_because_a_call_runs_no_line_of_it():
    class Makes(Plain):
        def make(self, task):
            return Yields(*GOOD)

    class Closes(Plain):
        async def close(self):
            yield

    for environments, name in ((Makes(), "Yields"), (Closes(), "Closes")):
        with pytest.raises(ConfigError, match=rf"{name}\.close \(.*:\d+\) contains `yield`"):
            hosted(environments)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, r"Makes\.make \(.*\) must return an object with start, step and close, not None"),
        (Turns([{"role": "user"}], GOOD[1]), r"Turns\.start \(.*\) must return an Observation, not \["),
        (Turns(GOOD[0], 1.0), r"Turns\.step \(.*\) must return a Step, as in Step\(reward=1\.0, done=True\), not 1\.0"),
        (Turns(GOOD[0], None), r"Turns\.step \(.*\) must return a Step"),
    ],
)
def test_an_object_that_is_not_an_episode_is_an_error_that_names_the_users_class(made, says):
    class Makes(Plain):
        def make(self, task):
            return made

    with pytest.raises(DataError, match=says):
        hosted(Makes())
