"""The curriculum: which tasks it prefers, what it lets rest, and that a resumed run draws the same."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest

from tests.groups import group
from tests.rollouts.test_source import Constant, source, uids
from tests.toy import Flaky, Lowercase
from whet.base.errors import ConfigError, DataError
from whet.config import SettingsError
from whet.core.types import Group, Task
from whet.rollouts.curriculum import PassRateCurriculum, PassRateSampler
from whet.rollouts.filters import DynamicSampling
from whet.rollouts.group_metrics import pass_rate

NONE_BUSY: frozenset[int] = frozenset()


def tasks(count: int, **difficulties: Any) -> list[Task]:
    return [Task(f"t{i}", [], {"difficulty": difficulties.get(f"t{i}")}) for i in range(count)]


def answered(right: int, of: int = 8) -> Group:
    return group("g", [1], [[2]] * of, [1.0] * right + [0.0] * (of - right))


class Bandit:
    """Tasks that are solved with fixed probabilities, drawn by a curriculum, eight a step."""

    def __init__(self, chances: list[float], seed: int = 0, **settings: Any) -> None:
        self.chances, self.seed = chances, seed
        self.draws = PassRateCurriculum(**settings).sampler_for(tasks(len(chances)), seed)
        self.steps: list[list[int]] = []

    def run(self, steps: int) -> "Bandit":
        for step in range(len(self.steps), len(self.steps) + steps):
            drawn = []
            for _ in range(8):
                drawn.append(self.draws.draw(step, set(drawn)))
            for place, task in enumerate(drawn):
                dice = random.Random(f"{self.seed} {step} {place}")
                self.draws.measured(task, answered(sum(dice.random() < self.chances[task] for _ in range(8))), step)
            self.steps.append(drawn)
        return self

    def visits(self, task: int) -> list[int]:
        """The steps in which it was drawn."""
        return [step for step, drawn in enumerate(self.steps) if task in drawn]


SOLVED, UNSOLVED, LEARNABLE = range(20), range(20, 40), range(40, 60)
MIXED = [1.0] * 20 + [0.0] * 20 + [0.5] * 20


def test_tasks_that_are_sometimes_solved_are_drawn_most() -> None:
    bandit = Bandit(MIXED, recheck_after=20).run(100)
    drawn = Counter(task for step in bandit.steps[20:] for task in step)
    learnable = sum(drawn[task] for task in LEARNABLE)
    assert learnable / drawn.total() > 0.55, "a third without a curriculum"
    assert min(drawn[task] for task in LEARNABLE) > 0, "all of them"


def test_a_target_moves_what_is_drawn() -> None:
    chances = [0.2] * 20 + [0.8] * 20

    def hard(target: float) -> float:
        drawn = Counter(task for step in Bandit(chances, target=target, explore=0.1).run(100).steps for task in step)
        return sum(drawn[task] for task in range(20)) / drawn.total()

    assert hard(0.2) > 0.6 > 0.4 > hard(0.8)


@pytest.mark.parametrize("target", [0.2, 0.5, 0.7])
def test_the_target_weighs_most_and_nothing_weighs_nothing(target: float) -> None:
    weight = PassRateCurriculum(target=target).weight
    rates = [i / 100 for i in range(101)]
    assert max(rates, key=weight) == pytest.approx(target, abs=0.04)
    assert min(map(weight, rates)) > 0


def test_what_is_always_or_never_solved_rests_and_comes_back() -> None:
    bandit = Bandit(MIXED, retire_after=2, recheck_after=15).run(120)
    for task in [*SOLVED, *UNSOLVED]:
        first, second, *later = bandit.visits(task)
        assert later, "it is measured again"
        gaps = [b - a for a, b in zip([second, *later], later, strict=False)]
        assert all(gap >= 15 for gap in gaps), "and rests again"
        assert second - first >= 1
    numbers = bandit.draws.metrics().result()
    assert numbers["curriculum/solved"] == numbers["curriculum/unsolved"] == 20
    assert numbers["curriculum/active"] == 20
    assert numbers["curriculum/pass_rate"] == pytest.approx(0.5, abs=0.1)


def test_a_task_that_became_solvable_is_active_again() -> None:
    bandit = Bandit([0.0, *[0.5] * 20], recheck_after=10).run(40)
    assert bandit.draws.metrics().result()["curriculum/unsolved"] == 1
    before = len(bandit.visits(0))
    bandit.chances[0] = 0.5
    bandit.run(60)
    assert bandit.draws.metrics().result()["curriculum/unsolved"] == 0
    assert len(bandit.visits(0)) > before + 5


def test_a_visit_of_another_kind_ends_a_streak() -> None:
    draws = PassRateCurriculum(retire_after=2).sampler_for(tasks(1), 0)
    draws.draw(0, NONE_BUSY)
    for right in (8, 0, 8, 4, 8):
        draws.measured(0, answered(right), 0)
        assert draws.metrics().result()["curriculum/active"] == 1
    draws.measured(0, answered(8), 0)
    assert draws.metrics().result()["curriculum/solved"] == 1


def test_the_running_pass_rate_forgets_old_visits() -> None:
    draws = PassRateCurriculum(newest=0.5).sampler_for(tasks(1), 0)
    draws.draw(0, NONE_BUSY)
    rates = []
    for right in (8, 4, 0, 8):
        draws.measured(0, answered(right), 0)
        rates.append(draws.metrics().result()["curriculum/pass_rate"])
    assert rates == [1.0, 0.75, 0.375, 0.6875]
    even = PassRateCurriculum(newest=0.01).sampler_for(tasks(1), 0)
    even.draw(0, NONE_BUSY)
    for right in (8, 4, 0):
        even.measured(0, answered(right), 0)
    assert even.metrics().result()["curriculum/pass_rate"] == pytest.approx(0.5), "at least an even share"


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call executes."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_a_draw_costs_the_same_for_few_and_for_many_tasks(chance: float) -> None:
    costs = []
    for count in (64, 4096):
        draws = PassRateCurriculum(recheck_after=10**6).sampler_for(tasks(count), 0)
        for step in range(2):
            for task in [draws.draw(step, NONE_BUSY) for _ in range(count)]:
                draws.measured(task, answered(round(8 * chance)), step)
        draws.draw(2, NONE_BUSY)  # applies the measurements
        costs.append(lines_run(lambda draws=draws: [draws.draw(3, NONE_BUSY) for _ in range(20)]))
    assert costs[1] < 2.5 * costs[0]


@pytest.mark.parametrize("chance", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_it_never_runs_out(chance: float, count: int) -> None:
    bandit = Bandit([chance] * count, recheck_after=1000).run(30)
    assert all(0 <= task < count for step in bandit.steps for task in step)
    assert {task for step in bandit.steps for task in step} == set(range(count))


def test_within_a_step_no_task_comes_twice_while_there_are_others() -> None:
    for step in Bandit([0.5] * 9).run(40).steps:
        assert len(set(step)) == len(step)


def test_what_is_under_way_is_not_drawn_again_while_there_is_anything_else() -> None:
    draws = PassRateCurriculum().sampler_for(tasks(3), 0)
    first = [draws.draw(0, NONE_BUSY) for _ in range(3)]
    for task in first:
        draws.measured(task, answered(4), 0)
    for step in range(1, 30):
        assert draws.draw(step, set(first[:2])) == first[2]


@pytest.mark.parametrize(
    "difficulty", [float("nan"), float("inf"), 10**400, -(10**5000)], ids=["nan", "infinite", "large", "huge"]
)
def test_a_difficulty_that_is_not_a_finite_number_is_an_error_naming_the_task(difficulty: Any) -> None:
    with pytest.raises(DataError, match="task 't1': its difficulty must be a finite number, not"):
        PassRateCurriculum().sampler_for(tasks(2, t1=difficulty), 0)


def test_new_tasks_come_easiest_first_and_unrated_ones_last() -> None:
    rated = tasks(5, t0=4, t1=2.5, t2=True, t3=3, t4="hard")
    draws = PassRateCurriculum().sampler_for(rated, 0)
    assert [draws.draw(0, NONE_BUSY) for _ in range(5)][:3] == [1, 3, 0]


def test_without_difficulties_new_tasks_come_shuffled_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        draws = PassRateCurriculum().sampler_for(tasks(30), seed)
        return [draws.draw(0, NONE_BUSY) for _ in range(30)]

    assert sorted(order(0)) == list(range(30))
    assert order(0) == order(0) != order(1)
    assert order(0) != list(range(30))


def test_a_group_lost_to_failures_rests_and_says_nothing() -> None:
    draws = PassRateCurriculum(recheck_after=5).sampler_for(tasks(1), 0)
    draws.draw(0, NONE_BUSY)
    draws.measured(0, None, 0)
    numbers = draws.metrics().result()
    assert numbers == {"curriculum/solved": 0, "curriculum/unsolved": 0, "curriculum/active": 0}
    draws.draw(5, NONE_BUSY)
    draws.measured(0, answered(4), 5)
    assert draws.metrics().result()["curriculum/active"] == 1


def test_right_is_the_score_correct_or_else_a_reward_above_the_threshold() -> None:
    made = answered(2, of=4)
    assert (pass_rate(made, 0.5), pass_rate(made, -1.0), pass_rate(made, 1.0)) == (0.5, 1.0, 0.0)
    for trajectory in made.episodes[:3]:
        trajectory.scores["correct"] = 0.0
    assert pass_rate(made, 0.5) == 0.0
    made.episodes[3].reward = 0.6
    assert pass_rate(made, 0.5) == 0.25


def test_a_resumed_curriculum_draws_the_same() -> None:
    whole = Bandit(MIXED, recheck_after=10).run(60)
    half = Bandit(MIXED, recheck_after=10).run(30)
    resumed = Bandit(MIXED, recheck_after=10)
    resumed.steps = list(half.steps)
    resumed.draws.load_state(json.loads(json.dumps(half.draws.state())))
    assert resumed.run(30).steps == whole.steps
    assert resumed.draws.state() == whole.draws.state()


def test_a_checkpoint_of_other_tasks_is_refused() -> None:
    state = PassRateCurriculum().sampler_for(tasks(3), 0).state()
    with pytest.raises(ConfigError, match="3 tasks, but there are 4 now"):
        PassRateCurriculum().sampler_for(tasks(4), 0).load_state(state)
    for others, seed in ((tasks(3), 1), (tasks(3)[::-1], 0), (tasks(4)[1:], 0)):
        with pytest.raises(ConfigError, match="another seed, other tasks, or another order"):
            PassRateCurriculum().sampler_for(others, seed).load_state(state)


@pytest.mark.parametrize(
    "settings",
    [{"target": 0.0}, {"target": 1.0}, {"explore": 0.0}, {"newest": 0.0}, {"retire_after": 0}, {"recheck_after": 0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        PassRateCurriculum(**settings)


class Uneven(Lowercase):
    """Even tasks are always solved, those divisible by three never, the others by every second answer."""

    size: int = 60

    async def score_group(self, task: Task, group: Group) -> None:
        number = int(task.uid.split("/")[-1])
        for place, trajectory in enumerate(group.episodes):
            right = place % 2 == 0 if learnable(task.uid) else number % 2 == 0
            trajectory.reward = trajectory.scores["correct"] = float(right)


def learnable(uid: str) -> bool:
    number = int(uid.split("/")[-1])
    return number % 2 != 0 and number % 3 != 0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_source_with_a_curriculum_comes_to_the_tasks_that_teach(tiny_model: Path, max_staleness: int) -> None:
    async def go() -> None:
        settings = {"curriculum": {"type": "pass_rate", "retire_after": 1}, "max_staleness": max_staleness}
        async with source(tiny_model, Uneven(), **settings) as rollouts:
            steps = []
            for version in range(1, 15):
                steps.append(uids(await rollouts.next_groups()))
                await rollouts.published(version)
            late = [uid for step in steps[8:] for uid in step]
            assert sum(map(learnable, late)) / len(late) > 0.5, "a third without a curriculum"
            numbers = rollouts.tally()[0].result()
            assert numbers["curriculum/solved"] > 0
            assert numbers["curriculum/unsolved"] > 0

    asyncio.run(go())


def test_groups_that_filters_drop_are_measured_too(tiny_model: Path) -> None:
    async def go() -> None:
        changes: dict[str, Any] = {"curriculum": {"type": "pass_rate"}, "max_sampling_rounds": 2}
        async with source(tiny_model, Constant(), [DynamicSampling()], **changes) as rollouts:
            with pytest.raises(DataError, match="only 0 passed the filters"):
                await rollouts.next_groups()
            assert isinstance(rollouts.curriculum, PassRateSampler)
            assert rollouts.curriculum.metrics().result()["curriculum/pass_rate"] == 1.0
            assert len(rollouts.curriculum.seen) == 6

    asyncio.run(go())


def test_a_task_lost_to_failures_is_not_drawn_again_at_once(tiny_model: Path) -> None:
    async def go() -> None:
        taskset = Flaky(failures={"toy/train/3": 99}, met={})
        settings: dict[str, Any] = {"curriculum": {"type": "pass_rate"}, "max_failed": 0.5, "retries": 0}
        async with source(tiny_model, taskset, **settings) as rollouts:
            for version in range(1, 9):
                await rollouts.next_groups()
                await rollouts.published(version)
        assert taskset.met["toy/train/3"] == 2, "one group of two answers in eight steps"

    asyncio.run(go())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resumed_source_draws_the_same_tasks(tiny_model: Path, max_staleness: int) -> None:
    changes: dict[str, Any] = {"curriculum": {"type": "pass_rate"}, "max_staleness": max_staleness}

    async def go() -> None:
        async with source(tiny_model, Uneven(), **changes) as undisturbed:
            for version in range(1, 6):
                await undisturbed.next_groups()
                await undisturbed.published(version)
            state = json.loads(json.dumps(undisturbed.state()))
            expected = [uids(await undisturbed.next_groups())]
            await undisturbed.published(6)
            expected.append(uids(await undisturbed.next_groups()))
        async with source(tiny_model, Uneven(), **changes) as resumed:
            resumed.load_state(state, version=5)
            got = [uids(await resumed.next_groups())]
            await resumed.published(6)
            got.append(uids(await resumed.next_groups()))
        assert got == expected

    asyncio.run(go())


def test_a_curriculum_that_comes_or_goes_between_runs_is_refused(tiny_model: Path) -> None:
    async def go() -> None:
        changes: dict[str, Any] = {"curriculum": {"type": "pass_rate"}}
        async with source(tiny_model) as without, source(tiny_model, **changes) as with_one:
            states = without.state(), with_one.state()
            with pytest.raises(ConfigError, match=r"made without rollouts\.curriculum"):
                with_one.load_state(states[0], version=0)
            with pytest.raises(ConfigError, match=r"made with rollouts\.curriculum"):
                without.load_state(states[1], version=0)

    asyncio.run(go())


class Own(PassRateCurriculum):
    """A user's curriculum: always the last task."""

    def sampler_for(self, tasks: Any, seed: int) -> "LastTaskSampler":
        return LastTaskSampler(self, tasks, seed)


class LastTaskSampler(PassRateSampler):
    def draw(self, step: int, busy: Container[int]) -> int:
        super().draw(step, busy)
        return self._new[-1]

    def measured(self, task: int, group: Group | None, step: int) -> None:
        """Nothing is learned."""


def test_ones_own_curriculum_is_named_by_its_path(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, curriculum={"type": "tests.rollouts.test_curriculum:Own"}) as rollouts:
            assert len({group.task.uid for group in await rollouts.next_groups()}) == 1

    asyncio.run(go())
