"""Environments in worker processes and the same environments in the run: the time of a turn, and many episodes at
once whose tools wait, for several numbers of workers.

    python benchmarks/environment_workers.py --processes 1,2,4,8,16 --episodes 2000
"""

import argparse
import asyncio
import time

from whet.cluster.ray_environments import RayWorkerTasks
from whet.core.types import Message, Task
from whet.tasks.base import Environment, Observation, Step, TaskSet
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.workers import WorkerTasks

REPLY: Message = {"role": "assistant", "content": "a reply of ordinary length " * 8}


class Slow(TaskSet):
    """Episodes of ``turns`` turns, each of which waits ``seconds`` for a tool."""

    turns: int = 4
    seconds: float = 0.0

    def tasks(self, split: str) -> list[Task]:
        return [Task("slow/0", [{"role": "user", "content": "go"}])]

    def make(self, task: Task) -> Environment:
        return SlowTurns(self, task)


class SlowTurns(Environment):
    def __init__(self, tasks: Slow, task: Task) -> None:
        self.tasks, self.task, self.turns = tasks, task, 0

    async def start(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(self.tasks.seconds)
        self.turns += 1
        return Step(1.0, done=self.turns == self.tasks.turns, messages=[{"role": "tool", "content": "result " * 30}])


async def play(environments: IsolatedEnvironments, task: Task) -> None:
    environment = environments.make(task)
    try:
        await environment.start()
        while not (await environment.step(REPLY)).done:
            pass
    finally:
        await environment.close()


async def measure(taskset: TaskSet, turns: int, episodes: int, warm: int) -> tuple[float, float]:
    """Return the seconds of a turn of one episode alone, and of all ``episodes`` at once."""
    environments, task = IsolatedEnvironments(taskset.open()), taskset.tasks("train")[0]
    try:
        await asyncio.gather(*(play(environments, task) for _ in range(warm)))  # starts the processes
        start = time.perf_counter()
        await play(environments, task)
        alone = (time.perf_counter() - start) / turns
        start = time.perf_counter()
        await asyncio.gather(*(play(environments, task) for _ in range(episodes)))
        return alone, time.perf_counter() - start
    finally:
        await environments.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="16", help="numbers of workers, as in 1,4,16")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds that each tool call waits")
    parser.add_argument("--ray", action="store_true", help="workers on a Ray cluster of this machine")
    given = parser.parse_args()
    workers = RayWorkerTasks if given.ray else WorkerTasks
    quick, slow = Slow(turns=500), Slow(turns=4, seconds=given.seconds)
    for processes in (0, *map(int, given.processes.split(","))):
        wrapped = [workers(taskset=each, processes=processes) if processes else each for each in (quick, slow)]
        alone, _ = asyncio.run(measure(wrapped[0], 500, 0, max(1, processes)))
        _, together = asyncio.run(measure(wrapped[1], 4, given.episodes, max(1, processes)))
        print(
            f"{processes or 'no'} workers: {1000 * alone:.2f} ms a turn alone; {given.episodes} episodes of 4 turns: "
            f"{together:.1f} s, {60 * given.episodes / together:,.0f} a minute",
            flush=True,
        )


if __name__ == "__main__":
    main()
