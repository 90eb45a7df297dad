"""Task sets for the tests of environment workers, which import them by name."""

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests.toy import Lowercase
from whet.core.types import Group, Message, Task
from whet.tasks.base import Environment, Observation, Step, TaskSet


class Counting(TaskSet):
    """Episodes of two turns. A task is what its episode does; ``folder`` has a file for each thing that was done."""

    folder: str = ""
    size: int = 4

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}/{n}", [{"role": "user", "content": str(n)}], {"n": n}) for n in range(self.size)]

    def make(self, task: Task) -> Environment:
        return Turns(self, task)

    async def score_group(self, task: Task, group: Group) -> None:
        for place, episode in enumerate(group.episodes):
            episode.reward += place
            episode.scores["place"] = float(place)


class Turns(Environment):
    def __init__(self, tasks: Counting, task: Task) -> None:
        self.folder, self.task, self.turns = Path(tasks.folder), task, 0

    async def start(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, reply: Message) -> Step:
        self.turns += 1
        does = self.task.data.get("does", "")
        if does == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "exit":
            os._exit(3)
        if does == "block":
            self.loop_for_ever()
        if does == "wait":
            (self.folder / "began").touch()
            await asyncio.sleep(3600)
        if does == "raise":
            raise ValueError("this step is wrong")
        if does == "memory":
            bytearray(2**40)
        if does == "system memory":
            raise no_memory()
        if does == "pid":
            return Step(scores={"pid": float(os.getpid())})
        if does == "unpicklable":
            return Step(scores={"lock": threading.Lock()})  # type: ignore[dict-item]
        last = self.turns == 2
        return Step(0.5, done=last, messages=[] if last else [{"role": "user", "content": "again"}])

    async def close(self) -> None:
        if self.task.data.get("does") == "wait":
            (self.folder / "closed").touch()

    def loop_for_ever(self) -> None:
        while True:
            time.sleep(0.01)


def no_memory() -> OSError:
    """Return the error of a system call for which there is no memory."""
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.getcwd())


class Large(Counting):
    """A system call fails for lack of memory while the task set is opened."""

    def open(self) -> "Large":
        raise no_memory()


class CrashesOnce(Lowercase):
    """The first grading of a training task kills its worker."""

    folder: str

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        mark = Path(self.folder) / "mark"
        if "train" in task.uid and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().grade(task, answer)


class Crashes(Lowercase):
    """Each grading kills its worker."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return await super().grade(task, answer)


class Versioned(TaskSet):
    """The reward is the version of ``toytool``, a package that only the workers have."""

    def tasks(self, split: str) -> list[Task]:
        import toytool

        prompt = [{"role": "user", "content": f"version {toytool.VERSION}"}]
        return [Task(f"{split}/{n}", prompt, {"listed": toytool.VERSION}) for n in range(4)]

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        import toytool

        if answer == "raise":
            raise toytool.ToyError("an error of the package")
        return {"reward": toytool.VERSION, "listed": task.data["listed"], "torch": float("torch" in sys.modules)}
