"""A blend: shares, whose limits and filters apply, metrics by environment, and the same draws after a resume."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.groups import group
from tests.rollouts.test_source import source
from tests.toy import Lowercase, read_settings, toy_settings
from whet.base.errors import ConfigError
from whet.config import RecipeError
from whet.core.types import Group, Task
from whet.rollouts.blend import Blend, BlendSampler, Part
from whet.rollouts.curriculum import PassRateCurriculum
from whet.rollouts.filters import BestAndWorst, DynamicSampling
from whet.rollouts.group_metrics import ByEnvironment
from whet.rollouts.rewards import Score
from whet.rollouts.sampling import Limits
from whet.tasks.base import Environments
from whet.tasks.cases import Case
from whet.tasks.validate import validate, wrong

NONE_BUSY: frozenset[int] = frozenset()


class Uid(Lowercase):
    """Right is the uid that the task set knows; all others earn the same."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        assert task.environment == ""
        return {"reward": float(answer == task.uid)}

    async def score_group(self, task: Task, group: Group) -> None:
        assert task.uid.startswith("toy/")

    def gold(self, task: Task) -> str:
        return task.uid

    def cases(self) -> list[Case]:
        return [Case("nothing", self.tasks("test")[0], "", 0.0, "boundary")]


def blend(shares: Any = "kept", **weights: float) -> Blend:
    return Blend(of={name: Part(taskset=Uid(size=5), weight=weight) for name, weight in weights.items()}, shares=shares)


def drawn(draws: BlendSampler, count: int, tasks: list[Task]) -> list[str]:
    return [tasks[draws.draw(0, NONE_BUSY)].environment for _ in range(count)]


def begun(wanted: Blend, seed: int = 0) -> tuple[BlendSampler, list[Task]]:
    tasks = list(wanted.tasks("train"))
    return wanted.sampler_for(tasks, seed), tasks


def test_an_environments_own_filters_do_not_replace_what_the_algorithm_needs(tiny_model: Path) -> None:
    async def go() -> None:
        wanted = Blend(of={"a": Part(taskset=Lowercase(), filters=())})
        async with source(tiny_model, wanted, [DynamicSampling()], pairing=[BestAndWorst()]) as rollouts:
            assert rollouts._filters(rollouts.tasks[0]) == (BestAndWorst(),)

    asyncio.run(go())


def test_limits_that_leave_no_room_for_a_reply_are_refused(tmp_path: Path) -> None:
    part = {"taskset": "tests.toy:Lowercase", "sampling": {"max_episode_tokens": 100}}
    with pytest.raises(RecipeError, match=r"data\.of\.a\.sampling: max_episode_tokens = 100 leaves no room"):
        read_settings(toy_settings(tmp_path, data={"type": "blend", "of": {"a": part}}))


def test_every_step_has_the_shares_exactly() -> None:
    draws, tasks = begun(blend(math=0.5, code=0.25, tools=0.25))
    for _ in range(20):
        assert Counter(drawn(draws, 8, tasks)) == {"math": 4, "code": 2, "tools": 2}


def test_odd_shares_are_kept_over_time_up_to_one() -> None:
    draws, tasks = begun(blend(a=1.0, b=2.718, c=0.1))
    found = Counter[str]()
    for count in range(1, 400):
        found.update(drawn(draws, 1, tasks))
        for name, weight in {"a": 1.0, "b": 2.718, "c": 0.1}.items():
            assert abs(found[name] - count * weight / 3.818) <= 1


def test_each_environment_goes_through_its_own_tasks() -> None:
    draws, tasks = begun(blend(a=1.0, b=3.0))
    uids = [tasks[draws.draw(0, NONE_BUSY)].uid for _ in range(20)]
    assert sorted(uid for uid in uids if uid.startswith("a/")) == [f"a/toy/train/{i}" for i in range(5)]
    assert max(Counter(uids).values()) == 3


def test_a_dropped_group_is_replaced_by_its_own_environment_where_shares_are_of_what_is_kept() -> None:
    for shares, expected in (("kept", "b"), ("drawn", "a")):
        draws, tasks = begun(blend(shares, a=3.0, b=1.0))
        drawn(draws, 4, tasks)
        draws.dropped(next(i for i, task in enumerate(tasks) if task.environment == "b"))
        assert drawn(draws, 1, tasks) == [expected]


def test_a_resumed_run_draws_the_same() -> None:
    wanted = Blend(
        of={
            "a": Part(taskset=Uid(size=5), weight=0.3),
            "b": Part(taskset=Uid(size=9), weight=0.7, curriculum=PassRateCurriculum()),
        }
    )
    draws, _ = begun(wanted)
    for step in range(10):
        index = draws.draw(step, NONE_BUSY)
        draws.measured(index, group("g", [1], [[2]] * 2, [1.0, 0.0]) if step % 3 else None, step)
        if step % 4 == 0:
            draws.dropped(index)
    draws.metrics()
    again, _ = begun(wanted)
    again.load_state(json.loads(json.dumps(draws.state())))
    assert [again.draw(9, NONE_BUSY) for _ in range(30)] == [draws.draw(9, NONE_BUSY) for _ in range(30)]
    assert again.by_environment.history == draws.by_environment.history
    with pytest.raises(ConfigError, match="made with the environments a, b, but the recipe has a, c"):
        begun(blend(a=1.0, c=1.0))[0].load_state(draws.state())


def test_each_environment_knows_its_tasks_by_their_own_names() -> None:
    graded = asyncio.run(validate(blend(a=1.0, b=1.0), 4))
    assert not wrong(graded)
    assert [one.name for one in graded[:2]] == ["a: nothing", "b: nothing"]
    uids = [task.uid for task in blend(a=1.0, b=1.0).tasks("test")]
    assert len(set(uids)) == len(uids) == 10


def test_all_environments_are_closed_even_if_one_fails() -> None:
    closed = []

    class Closes(Environments):
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    environments = blend(a=1.0, b=1.0).open()
    environments.parts = {"a": Closes("a"), "b": Closes("b")}
    with pytest.raises(OSError):
        asyncio.run(environments.close())
    assert sorted(closed) == ["a", "b"]


def test_limits_filters_and_rewards_are_those_of_the_environment(tiny_model: Path) -> None:
    wanted = Blend(
        of={
            "short": Part(taskset=Lowercase(), sampling=Limits(max_new_tokens=3), rewards=Score(weight=2.0)),
            "plain": Part(taskset=Lowercase(), filters=()),
        }
    )

    async def go() -> tuple[list[Group], dict[str, float]]:
        async with source(tiny_model, wanted, prompts_per_step=4, filters=[DynamicSampling()]) as rollouts:
            groups = await rollouts.next_groups()
            return groups, rollouts.tally()[0].result()

    groups, metrics = asyncio.run(go())
    assert Counter(one.task.environment for one in groups) == {"short": 2, "plain": 2}
    for one in groups:
        for episode in one.episodes:
            if one.task.environment == "short":
                assert episode.trained_tokens <= 3
                assert episode.reward == 2 * episode.scores["graded"]
            else:
                assert "graded" not in episode.scores
    assert metrics["env/short/length"] <= 3 < metrics["env/plain/length"]
    assert metrics["env/plain/groups"] == 2
    assert metrics["env/plain/failures"] == 0


def steps(alarm: ByEnvironment, rewards: dict[str, float]) -> dict[str, float]:
    for name, reward in rewards.items():
        alarm.count(name, group("g", [1], [[2]], [reward]))
    return alarm.metrics().result()


def test_an_environment_that_falls_while_the_mean_rises_is_named(caplog: pytest.LogCaptureFixture) -> None:
    alarm = ByEnvironment(["a", "b"])
    wobble = [0.01, -0.01]
    for step in range(30):
        values = steps(alarm, {"a": 0.5 + 0.02 * step + wobble[step % 2], "b": 0.5 - 0.01 * step + wobble[step % 2]})
        assert values["env/a/falling"] == 0
        assert values["env/b/falling"] == (step >= 19)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "the reward of b falls while the mean of all environments rises" in warnings[0]


@pytest.mark.parametrize("slope", [0.0, -0.02], ids=["noise", "all fall"])
def test_noise_and_a_run_that_gets_worse_as_a_whole_raise_no_alarm(slope: float) -> None:
    alarm = ByEnvironment(["a", "b"])
    for step in range(40):
        noise = 0.1 * ((step * 7919 % 13) / 13 - 0.5)
        values = steps(alarm, {"a": 0.5 + slope * step - noise, "b": 0.5 + slope * step + noise})
        assert values["env/a/falling"] == values["env/b/falling"] == 0


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ({"of": {}}, {}, r"data\.of"),
        ({"of": {"a b": {"taskset": "arithmetic"}}}, {}, "a b"),
        ({"of": {"a": {"taskset": {"type": "blend", "of": {"b": {"taskset": "arithmetic"}}}}}}, {}, "a is itself a"),
        ({"of": {"a": {"taskset": "arithmetic", "sampling": {"max_new_tokens": 999}}}}, {}, r"data\.of\.a\.sampling"),
        (
            {"of": {"a": {"taskset": "arithmetic"}}},
            {"rollouts": {"curriculum": "pass_rate"}},
            r"rollouts\.curriculum is not read where",
        ),
        (
            {"of": {"a": {"taskset": "arithmetic"}}},
            {"evaluation": {"sets": {"a": {"data": "arithmetic"}}}},
            r"evaluation\.sets\.a has the name of an environment",
        ),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, data: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        read_settings(toy_settings(tmp_path, data={"type": "blend", **data}, **changes))
