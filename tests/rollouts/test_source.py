"""The source: order, permits, failures, filters and what a checkpoint holds of it. With a real, tiny generator."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.groups import group
from tests.toy import Flaky, Hanging, Lowercase, toy_recipe
from tests.weights.collected import load_into
from whet.base.errors import ConfigError, DataError, DeadlineError, WhetError
from whet.core.types import Group, Task
from whet.data.order import TaskOrder
from whet.processes.pool import Pool
from whet.rollouts.blend import Blend
from whet.rollouts.config import RolloutConfig
from whet.rollouts.filters import DynamicSampling, Filter
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.source import RolloutSource
from whet.rollouts.tickets import Ticket
from whet.run.build import build_generator, build_renderer, trained_weights
from whet.tasks.base import Observation, Step, TaskSet
from whet.tasks.isolated import IsolatedEnvironments


class Constant(Lowercase):
    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": 1.0}


@asynccontextmanager
async def source(
    folder: Path,
    taskset: TaskSet | None = None,
    filters: Sequence[Any] = (),
    pairing: Sequence[Any] = (),
    **changes: Any,
) -> AsyncIterator[RolloutSource]:
    recipe = toy_recipe(folder)
    renderer = build_renderer(recipe)
    generator = build_generator(recipe, renderer)
    await load_into(generator, trained_weights(recipe, None).tensors())
    config = RolloutConfig(**({"prompts_per_step": 3, "retry_delay": 0.0} | changes))
    taskset = taskset or Lowercase()
    environments = IsolatedEnvironments(taskset.open())
    blend = taskset if isinstance(taskset, Blend) else None
    player = GroupPlayer(config, recipe.sampling, environments, generator, renderer, blend=blend, seed=7)
    made = RolloutSource(config, taskset.tasks("train"), player, group_size=2, filters=filters, pairing=pairing, seed=7)
    try:
        async with made:
            yield made
    finally:
        await generator.close()
        await environments.close()


def uids(groups: Sequence[Any]) -> list[str]:
    return [group.uid for group in groups]


def test_groups_come_in_the_order_of_their_tickets(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            first = await rollouts.next_groups()
            await rollouts.published(1)
            second = await rollouts.next_groups()
            assert [uid.split(":")[0] for uid in uids(first + second)] == [f"{i:07d}" for i in range(6)]
            assert len({group.task.uid for group in first + second}) == 6, "one epoch draws each task once"

    asyncio.run(go())


class Made(Sequence[Task]):
    """Tasks that are made when they are read, as a task set can return them for files that are too large to hold."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: Any) -> Task:
        if index >= len(self):
            raise IndexError
        return Task(f"made/{index}", [{"role": "user", "content": f"Say {index}."}], "a")


class Many(Lowercase):
    def tasks(self, split: str) -> Sequence[Task]:
        return Made()


def test_tasks_that_are_made_when_they_are_read_are_not_held(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Many()) as rollouts:
            groups = await rollouts.next_groups()
            await rollouts.published(1)
            gc.collect()
            alive = {each.uid for each in gc.get_objects() if type(each) is Task and each.uid.startswith("made/")}
            assert alive == {group.task.uid for group in groups}

    asyncio.run(go())


def test_in_step_nothing_is_sampled_before_it_is_asked_for(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            await rollouts.next_groups()
            await rollouts.published(1)
            assert rollouts.state()["pending"] == []

    asyncio.run(go())


def test_an_environment_that_fails_once_is_tried_again_and_costs_nothing(tiny_model: Path) -> None:
    async def go() -> None:
        taskset = Flaky(failures={f"toy/train/{i}": 1 for i in range(12)}, met={})
        async with source(tiny_model, taskset) as rollouts:
            groups = await rollouts.next_groups()
            metrics, _ = rollouts.tally()
            assert len(groups) == 3
            assert metrics.result()["groups/failed"] == 0
            assert metrics.result()["episodes/failed"] == 3
            assert metrics.result()["failures/ConnectionError"] == 3

    asyncio.run(go())


def test_a_group_lost_to_failures_is_replaced_and_counted_and_is_no_zero_reward(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as peek:
            victim = (await peek.next_groups())[1].task.uid
        async with source(tiny_model, Flaky(failures={victim: 99}, met={}), max_failed=0.5) as rollouts:
            groups = await rollouts.next_groups()
            assert len(groups) == 3
            assert victim not in {group.task.uid for group in groups}
            metrics = rollouts.tally()[0].result()
            assert metrics["groups/failed"] == 1
            assert metrics["groups/kept"] == 3
            assert metrics["tokens/trained"] == sum(e.trained_tokens for group in groups for e in group.episodes)
            assert metrics["tokens/failed"] > 0, "what was sampled for it is thrown away, in each attempt"
            whole = metrics["tokens/trained"] + metrics["tokens/failed"]
            assert metrics["tokens/goodput"] == pytest.approx(metrics["tokens/trained"] / whole)
            assert [group.task.uid for group in rollouts.lost] == [victim]
            await rollouts.published(1)
            await rollouts.next_groups()
            assert not rollouts.lost

    asyncio.run(go())


def test_a_failure_without_words_is_a_failed_group_like_any_other(tiny_model: Path) -> None:
    class Mute(Lowercase):
        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            raise DataError("")

    async def go() -> None:
        async with source(tiny_model, Mute(), max_failed=0.5) as rollouts:
            with pytest.raises(WhetError, match=r"groups of this step were lost to failures"):
                await rollouts.next_groups()

    asyncio.run(go())


def test_the_siblings_of_an_episode_that_ends_the_run_are_stopped(tiny_model: Path) -> None:
    class Broken(Lowercase):
        ended: list[str]

        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            if not self.ended:
                self.ended.append("the first one")
                while len(self.ended) < 2:
                    await asyncio.sleep(0.01)
                raise WhetError("the recipe is wrong")
            self.ended.append("waits")
            try:
                await asyncio.sleep(60)
            finally:
                self.ended.append("cancelled")
            return {"reward": 0.0}

    async def go() -> None:
        taskset = Broken(ended=[])
        async with source(tiny_model, taskset, prompts_per_step=1) as rollouts:
            with pytest.raises(WhetError, match="the recipe is wrong"):
                await rollouts.next_groups()
            assert taskset.ended == ["the first one", "waits", "cancelled"]

    asyncio.run(go())


class Opinionated(Lowercase):
    """Half of the answers get a score for style."""

    graded: list[str]

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        self.graded.append(task.uid)
        scores = await super().grade(task, answer)
        return scores | ({"style": 0.75} if self.graded.count(task.uid) == 1 else {})


def test_a_score_that_only_some_answers_carry_is_averaged_over_those(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Opinionated(graded=[])) as rollouts:
            groups = await rollouts.next_groups()
            assert sum("style" in t.scores for group in groups for t in group.episodes) == 3
            assert rollouts.tally()[0].result()["scores/style"] == 0.75

    asyncio.run(go())


def test_too_many_failures_stop_the_run_and_say_why(tiny_model: Path) -> None:
    async def go() -> None:
        taskset = Flaky(failures={f"toy/train/{i}": 99 for i in range(12)}, met={})
        async with source(tiny_model, taskset, retries=0) as rollouts:
            with pytest.raises(WhetError, match=r"rollouts\.max_failed.*the grader is away"):
                await rollouts.next_groups()

    asyncio.run(go())


class Broken(Lowercase):
    """The grader raises for some tasks, in a worker process."""

    victims: frozenset[str]
    pool: Any

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if task.uid in self.victims:
            await self.pool.call("tests.processes.functions:raise_bug")
        return await super().grade(task, answer)


def test_a_grader_that_raises_in_its_worker_costs_the_episode_and_only_many_of_them_the_run(tiny_model: Path) -> None:
    async def go() -> None:
        pool = Pool()
        try:
            async with source(tiny_model) as peek:
                victim = (await peek.next_groups())[1].task.uid
            few = Broken(victims=frozenset([victim]), pool=pool)
            async with source(tiny_model, few, max_failed=0.5, retries=1) as rollouts:
                assert len(await rollouts.next_groups()) == 3
                metrics = rollouts.tally()[0].result()
                assert (metrics["groups/failed"], metrics["failures/CallError"]) == (1, 4)
                assert [group.task.uid for group in rollouts.lost] == [victim]
            many = Broken(victims=frozenset(f"toy/train/{i}" for i in range(12)), pool=pool)
            async with source(tiny_model, many, retries=0) as rollouts:
                with pytest.raises(WhetError, match=r"rollouts\.max_failed(.*\n)*.*KeyError: 'a bug of the grader'"):
                    await rollouts.next_groups()
        finally:
            pool.close()

    asyncio.run(go())


def test_an_environment_that_hangs_meets_a_deadline(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Hanging(), deadline=0.5) as rollouts:
            with pytest.raises(DeadlineError, match=r"rollouts\.deadline"):
                await rollouts.next_groups()

    asyncio.run(go())


def test_a_slow_machine_meets_no_deadline_while_episodes_progress(tiny_model: Path) -> None:
    """Progress and deadline are timers of one event loop, whose order doesn't depend on how busy the machine is."""

    async def go(progresses: bool) -> Ticket:
        async with source(tiny_model, deadline=0.2) as rollouts:
            ticket = Ticket(0, 0, 0)

            async def play() -> None:
                for _ in range(20):  # far longer than the deadline
                    await asyncio.sleep(0.05)
                    rollouts.player.timing.progress += progresses
                ticket.group = group("0", [1], [[2]])

            ticket.job = asyncio.create_task(play())
            try:
                return await rollouts._finished([ticket])
            finally:
                ticket.job.cancel()

    assert asyncio.run(go(True)).group is not None
    with pytest.raises(DeadlineError, match=r"no episode had a reply or ended within rollouts.deadline = 0.2 s"):
        asyncio.run(go(False))


def test_an_attempt_that_takes_too_long_has_failed_and_is_tried_again(tiny_model: Path) -> None:
    class SlowOnce(Flaky):
        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            self.met[task.uid] = self.met.get(task.uid, 0) + 1
            await asyncio.sleep(60 if self.met[task.uid] == 1 else 0)
            return await super().grade(task, answer)

    async def go() -> None:
        async with source(tiny_model, SlowOnce(failures={}, met={}), episode_deadline=10.0) as rollouts:
            assert len(await rollouts.next_groups()) == 3
            assert rollouts.tally()[0].result()["failures/TimeoutError"] == 3
        async with source(tiny_model, Hanging(), episode_deadline=0.1, retries=1) as hopeless:
            with pytest.raises(WhetError, match=r"it took longer than rollouts.episode_deadline = 0.1 s"):
                await hopeless.next_groups()

    asyncio.run(go())


@pytest.mark.parametrize("changes", [{"order": "ready"}, {"partial": True}])
def test_in_step_there_is_no_order_and_nothing_partial(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs rollouts.max_staleness > 0"):
        RolloutConfig(**changes)
    RolloutConfig(max_staleness=1, **changes)


def test_filters_that_drop_everything_end_in_a_clear_error(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Constant(), [DynamicSampling()], max_sampling_rounds=2) as rollouts:
            with pytest.raises(DataError, match="of 6 groups sampled for this step 0 failed and only 0 passed"):
                await rollouts.next_groups()

    asyncio.run(go())


def test_prompts_over_the_limit_name_the_task_and_the_setting(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            rollouts.player.sampling = rollouts.player.sampling.model_copy(update={"max_prompt_tokens": 4})
            with pytest.raises(WhetError, match=r"toy/train/\d+.*sampling\.max_prompt_tokens"):
                await rollouts.next_groups()

    asyncio.run(go())


def test_ahead_of_step_the_budget_is_spent_and_no_more(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, max_staleness=2) as rollouts:
            await rollouts.next_groups()
            assert len(rollouts.state()["pending"]) == 6, "two further steps may be in flight"
            await rollouts.published(1)
            assert len(rollouts.state()["pending"]) == 9

    asyncio.run(go())


def test_a_resumed_source_goes_on_where_it_was(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as undisturbed:
            await undisturbed.next_groups()
            await undisturbed.published(1)
            state = json.loads(json.dumps(undisturbed.state()))
            expected = await undisturbed.next_groups()
        async with source(tiny_model) as resumed:
            resumed.load_state(state, version=1)
            got = await resumed.next_groups()
        assert uids(got) == uids(expected)
        assert [t.tokens for g in got for t in g.trajectories] == [t.tokens for g in expected for t in g.trajectories]

    asyncio.run(go())


@pytest.mark.parametrize("state", [{}, {"order": TaskOrder(12).state()}], ids=["replayed", "rows"])
def test_the_position_of_a_run_that_sampled_nothing_is_refused(tiny_model: Path, state: dict[str, Any]) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            with pytest.raises(ConfigError, match="sampled no answers, so it has no position in the tasks"):
                rollouts.load_state(state, version=1)

    asyncio.run(go())


async def ran_ahead(model: Path) -> tuple[dict[str, Any], list[Group]]:
    """Return the saved state of a source, and the groups that it has sampled for later steps."""
    async with source(model, max_staleness=1) as rollouts:
        await rollouts.next_groups()
        await asyncio.gather(*(ticket.job for ticket in rollouts._tickets if ticket.job))
        groups = [ticket.group for ticket in rollouts._tickets if ticket.group]
        return json.loads(json.dumps(rollouts.state())), groups


def test_finished_rollouts_that_ran_ahead_are_in_the_state(tiny_model: Path) -> None:
    async def go() -> None:
        state, expected = await ran_ahead(tiny_model)
        async with source(tiny_model, max_staleness=1) as resumed:
            resumed.load_state(state, version=0)
            assert await resumed.next_groups() == expected

    asyncio.run(go())


def test_groups_of_another_size_are_sampled_again(tiny_model: Path) -> None:
    async def go() -> None:
        state, sampled = await ran_ahead(tiny_model)
        async with source(tiny_model, max_staleness=1) as resumed:
            resumed.group_size -= 1
            resumed.load_state(state, version=0)
            groups = await resumed.next_groups()
            assert uids(groups) == uids(sampled)
            assert {len(group.episodes) for group in groups} == {resumed.group_size}

    asyncio.run(go())


def test_a_step_published_twice_is_noticed(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model) as rollouts:
            await rollouts.next_groups()
            await rollouts.published(1)
            with pytest.raises(WhetError, match="published twice"):
                rollouts.permits.give_back(3)

    asyncio.run(go())


def test_a_smaller_step_leaves_nothing_stale_behind(tiny_model: Path) -> None:
    class Sometimes(Lowercase):
        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            chosen = int(task.uid.split("/")[-1]) < 3
            return {"reward": float(sum(map(ord, answer))) if chosen else 0.0}

    async def go() -> None:
        changes: dict[str, Any] = {"max_sampling_rounds": 2, "when_exhausted": "smaller_step"}
        async with source(tiny_model, Sometimes(), [DynamicSampling()], **changes) as rollouts:
            sizes = []
            for version in range(1, 5):
                sizes.append(len(await rollouts.next_groups()))
                assert rollouts.state()["pending"] == []
                await rollouts.published(version)
                assert rollouts.permits.available == 3
            assert min(sizes) < 3

    asyncio.run(go())


class Scripted(Lowercase):
    """Groups of the first ``flat`` tickets have no spread."""

    flat: int
    met: list[str]

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if task.uid not in self.met:
            self.met.append(task.uid)
        spread = float(sum(map(ord, answer)))
        return {"reward": spread if self.met.index(task.uid) >= self.flat else 0.0}


def test_a_step_that_ends_on_a_kept_group_at_the_limit_is_reported_not_crashed(tiny_model: Path) -> None:
    async def go() -> None:
        made = Scripted(flat=1, met=[])
        async with source(tiny_model, made, [DynamicSampling()], max_sampling_rounds=1, concurrency=1) as rollouts:
            with pytest.raises(DataError, match="of 3 groups sampled for this step 0 failed and only 2 passed"):
                await rollouts.next_groups()

    asyncio.run(go())


class Comparing(Lowercase):
    """Scores whole groups; the first time it can't."""

    met: list[str]

    async def score_group(self, task: Task, group: Any) -> None:
        self.met.append(task.uid)
        if len(self.met) == 1:
            raise ConnectionError("the judge is away")


def test_a_group_that_cannot_be_compared_is_lost_and_counted(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Comparing(met=[]), max_failed=0.5) as rollouts:
            assert len(await rollouts.next_groups()) == 3
            assert rollouts.tally()[0].result()["groups/failed"] == 1
        async with source(tiny_model, Comparing(met=[]), max_failed=0.0) as strict:
            with pytest.raises(WhetError, match="the judge is away"):
                await strict.next_groups()

    asyncio.run(go())


class Own:
    """An environment that doesn't go through ``grade``."""

    def __init__(self, task: Task, reward: Any) -> None:
        self.task, self.reward = task, reward

    async def start(self) -> Observation:
        return Observation(list(self.task.prompt))

    async def step(self, reply: Any) -> Step:
        return Step(reward=self.reward, scores={"style": 1})

    async def close(self) -> None:
        """Nothing is held."""


class OwnSet(Lowercase):
    reward: Any

    def make(self, task: Task) -> Any:
        return Own(task, self.reward)


@pytest.mark.parametrize("reward", [None, "1", [1.0]])
def test_a_reward_that_is_no_finite_number_never_counts(tiny_model: Path, reward: Any) -> None:
    async def go() -> None:
        async with source(tiny_model, OwnSet(reward=reward)) as rollouts:
            with pytest.raises(WhetError, match="must be a finite number"):
                await rollouts.next_groups()

    asyncio.run(go())


def test_more_pending_rollouts_than_the_new_budget_start_nothing_further(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, max_staleness=1) as ahead:
            await ahead.next_groups()
            await ahead.published(1)
            state = json.loads(json.dumps(ahead.state()))
        async with source(tiny_model) as resumed:
            resumed.load_state(state, version=1)
            for version in (2, 3, 4):
                await resumed.next_groups()
                await resumed.published(version)
            assert resumed.permits.available == 3
            assert resumed.state()["pending"] == []

    asyncio.run(go())


def _emptied(group: Group) -> Group:
    return replace(group, episodes=[])


def _rewarded(group: Group) -> Group:
    group.episodes[0].reward = "good"  # type: ignore[assignment]
    return group


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda group: len(group.episodes) > 1, "must return the group, or None to drop it, not True"),
        (_emptied, "returns a group without episodes; it must return None to drop the group"),
        (_rewarded, "is 'good'; it must be a finite number"),
    ],
)
def test_a_filter_that_returns_no_group_is_named_with_its_place(
    tiny_model: Path, made: Callable[[Group], Any], words: str
) -> None:
    class Keeps(Filter):
        def __call__(self, group: Group) -> Group | None:
            return made(group)  # type: ignore[no-any-return]

    async def go() -> None:
        async with source(tiny_model, filters=[Keeps()]) as rollouts:
            with pytest.raises(DataError, match=rf"Keeps\.__call__ \(.*test_source\.py:\d+\) {words}"):
                await rollouts.next_groups()

    asyncio.run(go())
