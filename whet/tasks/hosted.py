"""The side of environment workers in their processes: the environments that ``workers.py`` calls, and the list of their
tasks."""

import pickle
from typing import Annotated

from whet.base.errors import ConfigError
from whet.config import Component, Config
from whet.core.types import Group, Message, Task
from whet.processes.child import Answer
from whet.processes.service import Outcome, failed
from whet.tasks.base import TASK_SETS, Environments, Observation, Step, TaskSet
from whet.tasks.isolated import IsolatedEnvironment, IsolatedEnvironments

Scored = tuple[float, dict[str, float], dict[str, float], list[float]]
"""The reward of an episode, its rewards by role, its scores, and the rewards of its spans."""


class _Hosted(Config):
    taskset: Annotated[TaskSet, Component(TASK_SETS)]


def hosted(settings: dict[str, object]) -> TaskSet:
    """Return the task set of these settings."""
    return _Hosted.from_values({"taskset": settings}).taskset


def listing() -> Answer:
    """Return the request handler of a process that lists tasks."""

    def answer(request: bytearray) -> bytes:
        try:
            settings, split = pickle.loads(request)
            return pickle.dumps(Outcome(list(hosted(settings).tasks(split))))
        except Exception as error:
            return failed(error)

    return answer


class HostedEnvironments:
    """The environments in a worker process, as a ``Served``."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._opened = hosted(settings).open()
        self._environments = IsolatedEnvironments(self._opened)
        self._episodes = dict[int, IsolatedEnvironment]()

    async def start(self, number: int, task: Task) -> Observation:
        if self._environments.program_for(task) is not None:
            raise ConfigError(f"{task.uid} is done by a program, which can't be played by data.type=workers")
        episode = self._episodes[number] = self._environments.make(task)
        return await episode.start()

    async def step(self, number: int, reply: Message) -> Step:
        return await self._episodes[number].step(reply)

    async def end(self, number: int) -> None:
        if episode := self._episodes.pop(number, None):
            await episode.close()

    async def check_one_reply(self) -> None:
        await self._opened.check_one_reply()

    async def scores_groups(self) -> bool:
        return type(self._opened).score_group is not Environments.score_group

    async def score_group(self, task: Task, group: Group) -> list[Scored]:
        """Return what the group's scoring may have set of each episode."""
        await self._environments.score_group(task, group)
        return [(e.reward, e.rewards, e.scores, [span.reward for span in e.spans]) for e in group.episodes]

    async def responds(self) -> None:
        await self._environments.responds()

    async def blocked_at(self) -> str | None:
        return self._environments.blocked_at()

    async def close(self) -> None:
        await self._environments.close()
