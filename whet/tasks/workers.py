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
import functools
import itertools
import json
import logging
import pickle
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from whet.base.errors import CallError, ConfigError, DeadlineError, WorkerError
from whet.config.component import cannot_be_found
from whet.core.types import Group, Message, Task
from whet.processes.child import Child, ChildDied
from whet.processes.service import Outcome, ServiceLostError
from whet.processes.virtual_environment import read_requirements
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tasks.cases import Case
from whet.tasks.episodes import play
from whet.tasks.hosted import HostedEnvironments, Scored
from whet.tasks.judges.config import own_judges
from whet.tasks.worker_process import Link, WorkerProcess
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
    memory_gib: float | None = Field(None, gt=0, le=1_000_000)
    """Address space of a worker, which ends when it needs more; None: no limit."""
    requirements: tuple[str, ...] | str = ()
    """Requirements as pip writes them, or the path of a file of them. The workers then run in a virtual environment
    with these packages, kept in the cache; the run's packages come after its packages."""
    python: str | None = None
    """The Python interpreter of the workers, of the run's version; None: the run's."""
    install_s: float = Field(900.0, gt=0)
    """Seconds until the requirements are installed."""

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
        if own_judges(self.taskset):
            raise ValueError(
                "the policy judges in the run, which a worker process can't ask; put the workers inside, as in {type: "
                "judge, judge: policy, taskset: {type: workers, ...}}, or name another model as the judge"
            )
        return self

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks, listed by the workers' interpreter if it differs from the run's."""
        process = self.process()
        python = process.interpreter()
        if python is None:
            return super().tasks(split)
        return _listed(python, json.dumps(process.taskset), split, self.start_s)

    def process(self) -> WorkerProcess:
        """Return the settings of the workers' processes."""
        settings = self.model_dump(mode="json", include=set(WorkerProcess.model_fields))
        if isinstance(self.requirements, str):
            settings["requirements"] = read_requirements(Path(self.requirements))
        return WorkerProcess.from_values(settings)

    async def started(self) -> Link:
        """Start the process of a worker."""
        return await self.process().started()

    def cases(self) -> Sequence[Case]:
        return self.taskset.cases()

    def stated(self, task: Task, answer: str) -> str | None:
        return self.taskset.stated(task, answer)

    @property
    def score_names(self) -> Collection[str]:
        return self.taskset.score_names

    @property
    def role_names(self) -> Collection[str]:
        return self.taskset.role_names

    def warnings(self) -> list[str]:
        return self.taskset.warnings()

    @property
    def grades(self) -> bool:
        return self.taskset.grades

    @property
    def states_answers(self) -> bool:
        return self.taskset.states_answers

    @property
    def one_reply(self) -> bool:
        return self.taskset.one_reply

    def open(self) -> "WorkerEnvironments":
        return WorkerEnvironments(self)


@functools.lru_cache(8)
def _listed(interpreter: str, settings: str, split: str, seconds: float) -> tuple[Task, ...]:
    """Return the tasks that a process lists."""
    child = Child(f"{HostedEnvironments.__module__}:listing", interpreter=interpreter)
    try:
        outcome: Outcome = pickle.loads(child.exchange(pickle.dumps((json.loads(settings), split)), seconds))
        return tuple(outcome.result())
    except (ChildDied, DeadlineError) as error:
        raise ConfigError(
            f"the tasks could not be listed by {interpreter}: its process {error}; see its messages above, which name "
            "a requirement that whet can't be imported with, or what takes longer than data.start_s"
        ) from None
    finally:
        child.kill()


class WorkerEnvironments(Environments):
    """Environments in worker processes. All calls must come from one event loop."""

    def __init__(self, tasks: WorkerTasks) -> None:
        self.workers = [Worker(tasks, number) for number in range(tasks.processes)]

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self.workers)

    @property
    def one_reply(self) -> bool:
        return True  # as far as it is known here

    async def check_one_reply(self) -> None:
        worker = self.least_busy()
        await worker.call(await worker.service(), "check_one_reply")

    def make(self, task: Task) -> Environment:
        return WorkerEpisode(self.least_busy(), task)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        """Return the scores of an episode whose only reply is ``answer``."""
        _, episode = await play(self.make(task), answer)
        return {"reward": episode.reward, **episode.scores}

    def least_busy(self) -> "Worker":
        return min(self.workers, key=lambda worker: worker.episodes)

    async def score_group(self, task: Task, group: Group) -> None:
        worker = self.least_busy()
        service = await worker.service()
        if not await service.call("scores_groups"):
            return
        results: list[Scored] = await worker.call(service, "score_group", task, group)
        for episode, (reward, rewards, scores, of_spans) in zip(group.episodes, results, strict=True):
            episode.reward, episode.rewards, episode.scores = reward, rewards, scores
            for span, earned in zip(episode.spans, of_spans, strict=True):
                span.reward = earned

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))


class Worker:
    """The place of one worker process, which is started when it is needed."""

    def __init__(self, tasks: WorkerTasks, number: int) -> None:
        self.tasks, self.number = tasks, number
        self.episodes = self.restarts = 0  # open episodes; processes lost
        self._service: Link | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def service(self) -> Link:
        """Return the running process. Raises the error of a task set that can't be opened in a process, and
        ``CallError`` if a lost process could not be replaced."""
        async with self._starting:
            if self._closed:
                raise CallError(f"environment worker {self.number} is closed")
            if self._service is not None and self._service.lost:
                log.warning("environment worker %d: %s; a new one is started", self.number, self._service.lost)
                self.restarts += 1
                lost, self._service = self._service, None
                await lost.close()
            if self._service is None:
                self._service = await self._start()
            return self._service

    async def call(self, service: Link, method: str, *arguments: object) -> Any:
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

    async def _start(self) -> Link:
        try:
            return await self.tasks.started()
        except ModuleNotFoundError:
            raise
        except (WorkerError, DeadlineError, MemoryError, ImportError) as error:  # of memory for a compiled module, too
            why = str(error) or "out of memory"
            # The next attempt may work if the task set could start before, or if something else killed the process.
            kind = CallError if self.restarts or why.startswith("was killed") else ConfigError
            raise kind(
                f"environment worker {self.number} could not start: {why}; see its messages above, and raise "
                "data.memory_gib or data.start_s if it needs more"
            ) from None


class WorkerEpisode(Environment):
    """An episode in a worker."""

    _numbers = itertools.count()

    def __init__(self, worker: Worker, task: Task) -> None:
        self.worker, self.task, self.number = worker, task, next(self._numbers)
        self._service: Link | None = None
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

    async def _call(self, method: str, *arguments: object) -> Any:
        assert self._service is not None, "start comes first"
        return await self.worker.call(self._service, method, self.number, *arguments)
