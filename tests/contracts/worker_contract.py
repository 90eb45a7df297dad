"""The contract of environment workers, in processes and on Ray: results as in the run, and losses that stay with their
episodes. Subclass ``WorkerContract``."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil
import pytest

from tests.contracts.fault_contract import eventually
from tests.tasks.worker_tasks import Counting, Large
from whet.base.errors import ConfigError
from whet.core.types import Episode, Group, Span, Task, Trajectory
from whet.processes.service import ServiceLostError
from whet.processes.user_code import user_frames, user_lines
from whet.rollouts.failures import is_mistake
from whet.tasks.base import TaskSet
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.workers import WorkerTasks

T = TypeVar("T")
Use = Callable[[IsolatedEnvironments], Awaitable[T]]
TWO = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]


def task(does: str, number: int = 0) -> Task:
    return Task(f"task/{number}", [{"role": "user", "content": "go"}], {"does": does})


def same_in_a_worker(taskset: TaskSet, use: Use[T]) -> T:
    """Return what ``use`` returns for environments in a worker, which must be what it returns for those in the run."""

    async def in_the_run() -> T:
        environments = IsolatedEnvironments(taskset.open())
        try:
            return await use(environments)
        finally:
            await environments.close()

    here = asyncio.run(in_the_run())
    assert WorkerContract().with_workers(taskset, use) == here
    return here


class WorkerContract:
    workers: ClassVar[type[WorkerTasks]] = WorkerTasks

    def with_workers(self, taskset: TaskSet, use: Use[T], **settings: Any) -> T:
        """Return what ``use`` returns for the environments of the task set in workers, one by default."""

        async def main() -> T:
            environments = IsolatedEnvironments(self.workers(taskset=taskset, **({"processes": 1} | settings)).open())
            try:
                return await use(environments)
            finally:
                await environments.close()

        return asyncio.run(main())

    def test_episodes_are_spread_over_the_processes(self) -> None:
        async def use(environments: IsolatedEnvironments) -> set[float]:
            played = [play(environments.make(task("pid")), "x") for _ in range(6)]
            return {step.scores["pid"] for _, step in await asyncio.gather(*played)}

        pids = self.with_workers(Counting(), use, processes=3)
        assert len(pids) == 3
        assert os.getpid() not in pids
        assert eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))

    def test_group_scores_are_set_as_in_the_run(self) -> None:
        async def use(environments: IsolatedEnvironments) -> Group:
            span = Span([1, 2], trained=True, logprobs=[0.0, 0.0], versions=(0, 0), reward=0.25)
            group = Group("g", task(""), [Episode([Trajectory([span])], reward=1.0) for _ in range(2)])
            await environments.score_group(group.task, group)
            return group

        episodes = self.with_workers(Counting(), use).episodes
        assert [(episode.reward, episode.scores) for episode in episodes] == [
            (1.0, {"place": 0.0}),
            (2.0, {"place": 1.0}),
        ]
        assert [span.reward for episode in episodes for span in episode.spans] == [0.25, 0.25]

    def test_a_mistake_keeps_its_class_and_its_line(self) -> None:
        async def use(environments: IsolatedEnvironments) -> Exception:
            with pytest.raises(ValueError, match="this step is wrong") as caught:
                await play(environments.make(task("raise")), "x")
            return caught.value

        error = self.with_workers(Counting(), use)
        assert is_mistake(error)
        assert user_frames(error)[-1].filename.endswith("worker_tasks.py")
        assert 'raise ValueError("this step is wrong")' in user_lines(error)

    @pytest.mark.parametrize(
        ("does", "why"),
        [
            ("crash", "was killed by SIGKILL"),
            pytest.param("exit", "exited with status 3", marks=pytest.mark.slow),
            ("memory", "exited with status 70"),
            pytest.param("system memory", "exited with status 70", marks=pytest.mark.slow),
        ],
    )
    def test_a_worker_that_ends_is_replaced_and_its_episode_failed_with_the_reason(self, does: str, why: str) -> None:
        async def use(environments: IsolatedEnvironments) -> tuple[float, int]:
            with pytest.raises(ServiceLostError, match=f"environment worker 0: its process {why}"):
                await play(environments.make(task(does)), "x")
            _, step = await play(environments.make(task("")), TWO)
            return step.reward, environments.restarts

        assert self.with_workers(Counting(), use, memory_gib=8) == (1.0, 1)

    def test_a_blocked_worker_is_killed_with_the_line_and_the_others_play_on(self) -> None:
        async def use(environments: IsolatedEnvironments) -> tuple[float, str]:
            blocked = asyncio.create_task(play(environments.make(task("block")), "x"))
            _, step = await play(environments.make(task("")), TWO)
            with pytest.raises(ServiceLostError) as caught:
                await blocked
            return step.reward, str(caught.value)

        reward, why = self.with_workers(Counting(), use, processes=2, blocked_s=10.0)
        assert reward == 1.0
        assert "was blocked at" in why
        assert "worker_tasks.py" in why
        assert "for 10 s and was killed" in why

    def test_an_attempt_given_up_in_a_step_closes_its_episode_in_the_worker(self, tmp_path: Path) -> None:
        async def use(environments: IsolatedEnvironments) -> None:
            played = asyncio.create_task(play(environments.make(task("wait")), "x"))
            assert await asyncio.to_thread(eventually, (tmp_path / "began").exists)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(played, 0.1)

        self.with_workers(Counting(folder=str(tmp_path)), use)
        assert (tmp_path / "closed").exists()

    def test_a_step_that_cannot_be_sent_is_an_error_not_a_reward(self) -> None:
        async def use(environments: IsolatedEnvironments) -> None:
            with pytest.raises(TypeError, match="pickle"):
                await play(environments.make(task("unpicklable")), "x")

        self.with_workers(Counting(), use)

    @pytest.mark.parametrize(("taskset", "memory_gib"), [(Counting(), 0.02), (Large(), None)])
    def test_a_worker_without_the_memory_to_start_ends_the_run(
        self, taskset: TaskSet, memory_gib: float | None
    ) -> None:
        async def use(environments: IsolatedEnvironments) -> None:
            with pytest.raises(ConfigError, match=r"environment worker 0 could not start: .*data\.memory_gib"):
                await play(environments.make(task("")), "x")

        self.with_workers(taskset, use, memory_gib=memory_gib)
