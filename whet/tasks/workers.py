"""Task sets whose episodes are played and graded in worker processes: code that blocks, crashes or leaks takes no other
environment with it.

    the run                                              a worker process
      WorkerEpisode.start, step, close ── messages ──▶  IsolatedEnvironments of the task set
                                       ◀── Step ──────

Sampling, tokens, log-probs and the list of tasks stay in the run. A worker that ends, or is blocked, is replaced by a
new one; the attempts at its open episodes have failed, and ``rollouts.retries`` plays them again with the same seeds.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from whet.base.errors import CallError, ConfigError, DeadlineError, WorkerError
from whet.config.component import cannot_be_found
from whet.core.types import Group, Message, Task
from whet.processes.service import Service, ServiceLostError
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tasks.cases import Case
from whet.tasks.isolated import IsolatedEnvironment, IsolatedEnvironments
from whet.tasks.program import AgentTasks
from whet.tasks.wrapped import WrappedTaskSet

log = logging.getLogger(__name__)

_CLOSING = 5.0  # seconds in which the environments of a worker must close


class WorkerTasks(WrappedTaskSet):
    """Tasks of ``taskset``, played and graded in processes of this machine."""

    processes: int = Field(2, ge=1, le=1000)
    """Worker processes, started when first needed. An episode stays in one of them, the one with the fewest."""
    blocked_s: float = Field(60.0, gt=0)
    """Seconds for which code may block its worker, which is then killed and replaced."""
    start_s: float = Field(120.0, gt=0)
    """Seconds until a new worker is ready."""
    memory_gib: float | None = Field(None, gt=0)
    """Address space of a worker, which ends when it needs more; None: no limit."""

    @model_validator(mode="after")
    def _can_be_played(self) -> Self:
        kind = type(self.taskset)
        if cannot_be_found(kind):
            raise ValueError(
                f"a worker process can't import {kind.__qualname__}, which is defined in a function or a notebook; "
                "move it to a module, or play it without data.type=workers"
            )
        if isinstance(self.taskset, WorkerTasks):
            raise ValueError("taskset is itself of the type workers; name the workers once")
        if isinstance(self.taskset, AgentTasks):
            raise ValueError("an agent runs in the run itself; put the workers inside: {type: agent, taskset: ...}")
        if hasattr(kind, "sampler_for"):
            raise ValueError("a blend can't be played by workers as a whole; put the workers around its task sets")
        return self

    def cases(self) -> Sequence[Case]:
        return self.taskset.cases()

    def stated(self, task: Task, answer: str) -> str | None:
        return self.taskset.stated(task, answer)

    def warnings(self) -> list[str]:
        return self.taskset.warnings()

    @property
    def grades(self) -> bool:
        return self.taskset.grades

    def open(self) -> "WorkerEnvironments":
        return WorkerEnvironments(self)


class WorkerEnvironments(Environments):
    """Environments in worker processes. All calls must come from one event loop."""

    def __init__(self, tasks: WorkerTasks) -> None:
        self.workers = [Worker(tasks, number) for number in range(tasks.processes)]

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self.workers)

    def make(self, task: Task) -> Environment:
        return WorkerEpisode(self.least_busy(), task)

    def least_busy(self) -> "Worker":
        return min(self.workers, key=lambda worker: worker.episodes)

    async def score_group(self, task: Task, group: Group) -> None:
        worker = self.least_busy()
        service = await worker.service()
        if not await service.call("scores_groups"):
            return
        results = await worker.call(service, "score_group", task, group)
        for episode, (reward, scores, rewards) in zip(group.episodes, results, strict=True):
            episode.reward, episode.scores = reward, scores
            for span, earned in zip(episode.spans, rewards, strict=True):
                span.reward = earned

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))


class Worker:
    """The place of one worker process, which is started when it is needed."""

    def __init__(self, tasks: WorkerTasks, number: int) -> None:
        self.tasks, self.number = tasks, number
        self.episodes = self.restarts = 0  # open episodes; processes lost
        self._settings = tasks.model_dump(mode="json")
        self._service: Service | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def service(self) -> Service:
        """Return the running process. Raises the error of a task set that can't be opened in a process, and
        ``CallError`` if a lost process could not be replaced."""
        async with self._starting:
            if self._closed:
                raise CallError(f"environment worker {self.number} is closed")
            if self._service is not None and self._service.lost:
                log.warning("environment worker %d: %s; a new one is started", self.number, self._service.lost)
                self.restarts += 1
                self._service = None
            if self._service is None:
                self._service = await self._start()
            return self._service

    async def call(self, service: Service, method: str, *arguments: Any) -> Any:
        """Return the result of a method of ``HostedEnvironments``."""
        try:
            return await service.call(method, *arguments)
        except ServiceLostError as error:
            raise ServiceLostError(f"environment worker {self.number}: {error}") from None

    async def close(self) -> None:
        self._closed = True
        if self._service is None:
            return
        try:
            async with asyncio.timeout(_CLOSING):
                await self._service.call("close")
        except (TimeoutError, ServiceLostError) as error:
            log.info("environment worker %d did not close: %s", self.number, error)
        finally:
            await self._service.close()

    async def _start(self) -> Service:
        memory = None if self.tasks.memory_gib is None else int(self.tasks.memory_gib * 2**30)
        limits = {"start_s": self.tasks.start_s, "blocked_s": self.tasks.blocked_s}
        try:
            path = f"{HostedEnvironments.__module__}:{HostedEnvironments.__qualname__}"
            return await Service.started(path, (self._settings,), memory=memory, **limits)
        except (WorkerError, DeadlineError, MemoryError) as error:
            kind = CallError if self.restarts else ConfigError  # if it could start before, the next attempt may work
            why = str(error) or "out of memory"
            raise kind(
                f"environment worker {self.number} could not start: {why}; see its messages above, and raise "
                "data.memory_gib or data.start_s if it needs more"
            ) from None


class WorkerEpisode(Environment):
    """An episode in a worker."""

    _numbers = itertools.count()

    def __init__(self, worker: Worker, task: Task) -> None:
        self.worker, self.task, self.number = worker, task, next(self._numbers)
        self._service: Service | None = None
        worker.episodes += 1

    async def start(self) -> Observation:
        self._service = await self.worker.service()
        observation: Observation = await self._call("start", self.task)
        return observation

    async def step(self, reply: Message) -> Step:
        step: Step = await self._call("step", reply)
        return step

    async def close(self) -> None:
        self.worker.episodes -= 1
        if self._service is not None:
            with contextlib.suppress(ServiceLostError):
                await self._call("end")

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self._service is not None, "start comes first"
        return await self.worker.call(self._service, method, self.number, *arguments)


class HostedEnvironments:
    """The environments in a worker process, as a ``Served``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._opened = WorkerTasks.from_values(settings).taskset.open()
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

    async def scores_groups(self) -> bool:
        return type(self._opened).score_group is not Environments.score_group

    async def score_group(self, task: Task, group: Group) -> list[tuple[float, dict[str, float], list[float]]]:
        """Return the reward and scores of each episode, and the rewards of its spans."""
        await self._environments.score_group(task, group)
        episodes = group.episodes
        return [(each.reward, each.scores, [span.reward for span in each.spans]) for each in episodes]

    async def responds(self) -> None:
        await self._environments.responds()

    async def blocked_at(self) -> str | None:
        return self._environments.blocked_at()

    async def close(self) -> None:
        await self._environments.close()
