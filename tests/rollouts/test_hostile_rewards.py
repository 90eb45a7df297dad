"""Odd rewards and odd answers, through the real source and a real, tiny generator: a value that is not a finite number
never becomes a reward, and answers without tokens do no harm."""

import asyncio
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.test_learning import lines
from tests.grids import grid
from tests.rollouts.test_source import source
from tests.toy import Lowercase, toy_recipe
from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from whet.base.errors import DataError, WhetError
from whet.core.batch import Batch
from whet.core.types import Group, Task
from whet.engines.base import Completion, SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.rollouts.filters import DynamicSampling
from whet.run import run

NO_NUMBERS: dict[str, Any] = {
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "None": None,
    "text": "1",
    "list": [1.0],
    "whole number beyond floats": 10**400,
    "complex": 1j,
    "numpy nan": np.float32("nan"),
    "tensor": torch.tensor(1.0),
}
each_wrong = pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
some_wrong = pytest.mark.parametrize("value", [math.nan, None], ids=["nan", "None"])  # the same function checks all


class Says(Lowercase):
    """Returns the given scores, for one task or for all."""

    scores: Any
    victim: str | None = None

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return self.scores if self.victim in (None, task.uid) else await super().grade(task, answer)


class Judges(Says):
    """Does the same in view of the group."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return await Lowercase.grade(self, task, answer)

    async def score_group(self, task: Task, group: Group) -> None:
        if self.victim in (None, task.uid):
            group.episodes[-1].scores |= {n: v for n, v in self.scores.items() if n != "reward"}
            group.episodes[-1].reward = self.scores.get("reward", 0.0)


@cache
def second_task(folder: Path) -> str:
    async def go() -> str:
        async with source(folder) as peek:
            return (await peek.next_groups())[1].task.uid

    return asyncio.run(go())


def check_lost_and_counted(folder: Path, kind: type[Says], scores: Any, says: str) -> None:
    victim = second_task(folder)

    async def go() -> None:
        async with source(folder, kind(scores=scores, victim=victim), max_failed=0.5) as rollouts:
            groups = await rollouts.next_groups()
            assert victim not in {group.task.uid for group in groups}
            assert len(groups) == 3
            found = rollouts.tally()[0].result()
            assert (found["groups/failed"], found["groups/kept"]) == (1, 3)
            assert math.isfinite(found["reward/mean"])
        async with source(folder, kind(scores=scores)) as rollouts:
            with pytest.raises(WhetError, match=rf"(?s)rollouts\.max_failed.*{says}"):
                await rollouts.next_groups()

    asyncio.run(go())


@each_wrong
def test_a_grade_that_is_no_finite_number_loses_its_group_and_says_which(tiny_model: Path, value: Any) -> None:
    check_lost_and_counted(
        tiny_model, Says, {"reward": value}, r"the reward returned by Says\.grade \(.*\) of task .*finite number"
    )


@some_wrong
def test_so_does_a_score_beside_the_reward(tiny_model: Path, value: Any) -> None:
    scores = {"reward": 1.0, "style": value}
    check_lost_and_counted(tiny_model, Says, scores, r"the score style returned by .*finite number")


@pytest.mark.parametrize("scores", [{}, {"correct": 1.0}])
def test_so_does_a_grade_without_a_reward(tiny_model: Path, scores: Any) -> None:
    says = r"Says\.grade \(.*test_hostile_rewards\.py:\d+\) of task .* must return the reward, or a dict with"
    check_lost_and_counted(tiny_model, Says, scores, says)


@some_wrong
def test_so_does_a_reward_that_score_group_sets(tiny_model: Path, value: Any) -> None:
    check_lost_and_counted(tiny_model, Judges, {"reward": value}, "the reward of .* after score_group is")


@some_wrong
def test_so_does_a_score_that_score_group_sets(tiny_model: Path, value: Any) -> None:
    check_lost_and_counted(tiny_model, Judges, {"style": value}, "the score style of .* after score_group is")


@pytest.mark.parametrize("value", [1, 0, -2, np.float32(0.5), np.int64(3)])
def test_whole_numbers_and_those_of_numpy_are_rewards(tiny_model: Path, value: Any) -> None:
    async def go() -> None:
        async with source(tiny_model, Says(scores={"reward": value})) as rollouts:
            rewards = {t.reward for group in await rollouts.next_groups() for t in group.episodes}
            assert rewards == {float(value)}
            assert all(type(reward) is float for reward in rewards)

    asyncio.run(go())


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3e11])
def test_rewards_that_are_all_equal_move_nothing(tiny_model: Path, reward: float) -> None:
    async def go() -> None:
        async with source(tiny_model, Says(scores={"reward": reward})) as rollouts:
            batch = Batch.from_groups(await rollouts.next_groups())
            batch.scores["correct"] = batch.reward
            for estimator in (
                GroupAdvantage(),
                GroupAdvantage(baseline="leave_one_out", divide_by_std=False),
                ReinforcePlusPlusAdvantage(group_baseline=True),
                GDPOAdvantage(components={"correct": 1.0}),
            ):
                assert not estimator(batch).advantages.any()

    asyncio.run(go())


def test_a_run_whose_rewards_are_all_equal_goes_on_and_its_gradient_is_zero(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "tests.rollouts.test_hostile_rewards:Says", "scores": {"reward": 0.1}}
    folder = run.start(toy_recipe(tiny_model, steps=2, data=data), tmp_path / "run")
    trained = lines(folder, "train")[1:]
    assert [(line["gradient_norm"], line["reward/std"], line["learner/skipped"]) for line in trained] == [(0, 0, 0)] * 2


def test_a_group_of_one_has_no_spread_and_no_advantage(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            rollouts.group_size = 1
            groups = await rollouts.next_groups()
            assert [len(group.episodes) for group in groups] == [1, 1, 1]
            assert rollouts.tally()[0].result()["reward/std"] == 0
            batch = Batch.from_groups(groups)
            assert not GroupAdvantage()(batch).advantages.any()
            assert not GroupAdvantage(baseline="leave_one_out")(batch).advantages.any()
            assert ReinforcePlusPlusAdvantage()(batch).advantages.isfinite().all()
        async with source(tiny_model, None, [DynamicSampling()], max_sampling_rounds=1) as rollouts:
            rollouts.group_size = 1
            with pytest.raises(DataError, match="of 3 groups sampled for this step 0 failed and only 0 passed"):
                await rollouts.next_groups()

    asyncio.run(go())


class Reticent(TorchGeneratorConfig):
    """The built-in generator, but replies end at once: all of them, or every other one."""

    all: bool = True
    keep_stop_token: bool = False

    def build_replica(self, *args: Any) -> Any:
        generator: Any = super().build_replica(*args)
        sample, calls = generator.sample, iter(range(10**6))

        async def short(prompt: list[int], params: SamplingParams, session: str) -> Completion:
            full = await sample(prompt, params, session)
            if not self.all and next(calls) % 2:
                return full
            stop = [params.stop_token_ids[0]] if self.keep_stop_token else []
            return Completion(stop, [-3.0] * len(stop), full.versions, "stop")

        generator.sample = short
        return generator


EMPTY = [(True, False), (True, True), (False, True), (False, False)]  # whether all are empty; whether a token ends them


@pytest.mark.parametrize(("algorithm", "empty"), grid(["grpo", "gspo", "reinforce_plus_plus", "ppo"], EMPTY))
def test_empty_answers_are_graded_recorded_and_harmless(
    tiny_model: Path, tmp_path: Path, algorithm: str, empty: tuple[bool, bool]
) -> None:
    everything, keep_stop_token = empty
    generator = {"type": "tests.rollouts.test_hostile_rewards:Reticent", "dtype": "float32", "max_batch": 16}
    recipe = toy_recipe(
        tiny_model,
        steps=2,
        algorithm={"type": algorithm, "group_size": 2, "minibatches": 3},
        generator=generator | {"max_context": 256, "all": everything, "keep_stop_token": keep_stop_token},
        evaluation={"enabled": False},
        checkpoints={"every": 0},
    )
    folder = run.start(recipe, tmp_path / "run")
    trained = lines(folder, "train")[1:]
    assert len(trained) == 2
    assert not any(line.get("learner/skipped") for line in trained)
    assert not any(line.get("not_finite") for line in trained)
    if everything:
        assert [line["answer/length_mean"] for line in trained] == [float(keep_stop_token)] * 2
        assert all(line["reward/mean"] == 0 for line in trained), "the grader saw an empty answer"
    if everything and not keep_stop_token:
        assert all(line["learner/empty"] > 0 for line in trained)
