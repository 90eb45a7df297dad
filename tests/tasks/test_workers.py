"""Environments in worker processes of this machine."""

import asyncio
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.contracts.worker_contract import WorkerContract, same_in_a_worker, task
from tests.tasks.built_in import BUILT_IN
from tests.tasks.worker_tasks import Counting
from whet.base.errors import CallError
from whet.config import SettingsError
from whet.processes.child import ChildDied
from whet.rollouts.blend import Blend, Part
from whet.tasks.base import TaskSet
from whet.tasks.episodes import play
from whet.tasks.games import SlidingPuzzle
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.pictures import Pictures
from whet.tasks.preference.reward_model import RewardModelTasks
from whet.tasks.program import AgentTasks
from whet.tasks.self_play import Nim
from whet.tasks.tools.corpus_search import CorpusSearch
from whet.tasks.users.booking import BookingDesk
from whet.tasks.worker_process import Link
from whet.tasks.workers import WorkerTasks

SOLVE = "tests.endpoint.programs:silent"


class TestProcesses(WorkerContract):
    """Worker processes of this machine."""


@pytest.mark.parametrize(
    "taskset",
    [
        pytest.param(
            taskset,
            id=type(taskset).__name__,
            marks=[pytest.mark.slow] * (not isinstance(taskset, BookingDesk | CorpusSearch | Pictures | SlidingPuzzle)),
        )
        for taskset in BUILT_IN
    ],
)
def test_every_built_in_task_set_grades_in_a_worker_as_in_the_run(taskset: TaskSet) -> None:
    tasks = taskset.tasks("test")[:2]
    answers = [(task, answer) for task in tasks for answer in (taskset.gold(task), "no answer") if answer is not None]

    async def results(environments: IsolatedEnvironments) -> list[Any]:
        return [await play(environments.make(task), answer) for task, answer in answers]

    same_in_a_worker(taskset, results)


def test_a_task_set_that_no_worker_can_import_is_refused() -> None:
    class Local(Counting):
        pass

    with pytest.raises(SettingsError, match=r"a worker process can't import .*Local"):
        WorkerTasks(taskset=Local())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"taskset": Counting(), "processes": 0}, "processes: expected at least 1"),
        ({"taskset": WorkerTasks(taskset=Counting())}, "name the workers once"),
        (
            {"taskset": Blend(of={"a": Part(taskset=Counting())})},
            "put WorkerTasks inside, around each of its task sets",
        ),
        ({"taskset": AgentTasks(taskset=Counting(), program=SOLVE)}, "AgentTasks can't be inside WorkerTasks"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        WorkerTasks(**settings)


def test_roles_of_episodes_in_workers_can_have_policies_of_their_own() -> None:
    assert WorkerTasks(taskset=Nim(opponent="self")).role_names == Nim(opponent="self").role_names != ()


def test_rewards_of_groups_in_workers_cannot_be_replaced() -> None:
    with pytest.raises(SettingsError, match="WorkerTasks sets the rewards of whole groups"):
        RewardModelTasks(taskset=WorkerTasks(taskset=Counting()), model="any")


def test_a_worker_that_is_killed_while_it_starts_fails_the_attempt_not_the_run() -> None:
    class Killed(WorkerTasks):
        async def started(self) -> Link:
            raise ChildDied("was killed by SIGKILL")

    environments = Killed(taskset=Counting()).open()
    with pytest.raises(CallError, match="environment worker 0 could not start: was killed by SIGKILL"):
        asyncio.run(environments.make(task("")).start())


SCRIPT = """
import asyncio, sys
from tests.tasks.worker_tasks import Counting
from tests.contracts.worker_contract import task
from whet.tasks.workers import WorkerTasks

async def main():
    environments = WorkerTasks(taskset=Counting(), processes=2).open()
    episodes = [environments.make(task("block")) for _ in range(2)]
    for episode in episodes:
        await episode.start()
    print(*(worker._service.pid for worker in environments.workers), flush=True)
    await asyncio.gather(*(episode.step({"role": "assistant", "content": "x"}) for episode in episodes))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the children of a killed process")
def test_nothing_is_left_when_the_run_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        run.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    until = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_lost_workers_inside_of_an_agent_are_counted() -> None:
    environments = AgentTasks(taskset=WorkerTasks(taskset=Counting()), program=SOLVE).open()
    environments.inner.workers[0].restarts = 3  # type: ignore[attr-defined]
    assert environments.restarts == 3
