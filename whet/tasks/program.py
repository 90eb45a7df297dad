"""Tasks that are done by a program: any agent that is written for OpenAI's or Anthropic's API.

The program is a function ``solve(task, base_url, api_key)``, called once for each episode, or a ``Command``. All of
its requests to the model behind ``base_url`` are recorded and trained on, with the one reward of the episode. A plain
function runs on a separate thread; an ``async`` function and the care of a command run on the thread of all
environments, which they must not block.
"""

import asyncio
import inspect
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from pydantic import Field, model_validator

from whet.base.errors import CallError, ConfigError, DataError
from whet.base.extras import require
from whet.config.component import import_path
from whet.core.types import Group, Task
from whet.processes.machine import cores
from whet.processes.threads import JobThread, outcome_of, run_in_thread
from whet.processes.user_code import check_runs
from whet.shells.links import link_to
from whet.shells.runtime import RuntimeFailure, RuntimeKind
from whet.tasks.base import Address, AskPolicy, Environment, Environments, Program, Step, called, checked_score, is_bool
from whet.tasks.cases import Case
from whet.tasks.command import Command
from whet.tasks.episodes import checked_scores, play
from whet.tasks.shell.base import TasksInShell
from whet.tasks.work_folder import pack
from whet.tasks.wrapped import WrappedTaskSet

Solve = Callable[[Task, str, str], Any]


class AgentTasks(WrappedTaskSet):
    """Tasks of ``taskset``, done by ``program``."""

    program: str | tuple[str, ...]
    """The function that does a task, as in ``my_agent:solve``. It returns a text, which the task set grades, or the
    reward, or a dict with ``reward`` and scores. Or the words of a command, which prints the text."""
    environment: dict[str, str] = Field(default={})
    """Variables of a command, besides the run's own and the address of the policy."""
    folder: str | None = None
    """A folder, of which each episode of a command gets a copy to work in; None: an empty one."""
    in_runtime: bool = False
    """Run a command in the runtime of a task set in a shell, where it reaches the policy and nothing else; off: on this
    machine, with the rights of the run."""
    at_once: int | None = Field(None, ge=1)
    """Most processes of a command at the same time; further episodes wait. None: 4 for each core."""
    deadline: float = Field(600.0, gt=0)
    """Seconds for one episode of the program, without the wait for others."""

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        program = self.program
        if isinstance(program, str):
            if not callable(function := import_path(program)):
                raise ValueError(f"program = {program} is not a function")
            _check_called(function, program)
        elif not program or (shutil.which(program[0]) is None and not self.in_runtime):
            raise ValueError(f"program: {program[0] if program else '[]'} is not a command that can be executed here")
        if self.in_runtime and not isinstance(self.taskset, TasksInShell):
            raise ValueError(
                f"in_runtime: {type(self.taskset).__name__} has no runtime. Leave in_runtime out, or take a task "
                "set in a shell, such as repositories"
            )
        return self

    @model_validator(mode="after")
    def _folder_is_graded_of_a_command(self) -> Self:
        if isinstance(self.taskset, TasksInShell) and (isinstance(self.program, str) or self.folder is not None):
            raise ValueError(
                f"{type(self.taskset).__name__} grades the files of the working folder: program must be a command (a "
                "list of words), and folder left out, because the task has files"
            )
        return self

    @model_validator(mode="after")
    def _has_one_reward(self) -> Self:
        self.check_one_role()
        return self

    @model_validator(mode="after")
    def _only_for_commands(self) -> Self:
        if isinstance(self.program, str) and (self.environment or self.folder is not None or self.at_once is not None):
            raise ValueError(
                "environment, folder and at_once are read only where program is a command (a list of words)"
            )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder = {self.folder} is not a folder")
        return self

    @property
    def has_programs(self) -> bool:
        return True

    @property
    def title(self) -> str:
        """The name of the program in messages."""
        return self.program if isinstance(self.program, str) else self.program[0]

    @property
    def solve(self) -> Solve:
        """The program as a function."""
        return cast(Solve, import_path(self.program)) if isinstance(self.program, str) else self.command.solve

    @property
    def command(self) -> Command:
        """The program as a command."""
        if self.in_runtime:
            return Command(tuple(self.program), self.environment)
        first = Path(shutil.which(self.program[0]) or self.program[0]).absolute()
        folder = None if self.folder is None else str(Path(self.folder).absolute())
        return Command((str(first), *self.program[1:]), self.environment, folder)

    def cases(self) -> Sequence[Case]:
        return self.taskset.cases()

    @property
    def score_names(self) -> Collection[str]:
        """Return the scores of the task set's grader, if a command prints the answer; a function may return others."""
        return () if isinstance(self.program, str) else self.taskset.named_scores or self.taskset.score_names

    def open(self) -> "AgentEnvironments":
        require("serve", "data.type=agent", "starlette", "uvicorn")
        environments = AgentEnvironments(self)
        if self.in_runtime and isinstance(self.taskset, TasksInShell):
            for kind in self.taskset.runtimes():
                _check_inside(kind, self.title)
        return environments


class AgentEnvironments(Environments):
    """Episodes of the program, graded by the task set."""

    def __init__(self, tasks: AgentTasks) -> None:
        self.tasks, self.inner = tasks, tasks.taskset.open()
        self.solve = tasks.solve
        of_a_function = isinstance(tasks.program, str)  # many wait on one thread, or on threads of little memory
        self.places = nullcontext() if of_a_function else asyncio.Semaphore(tasks.at_once or 4 * cores())

    def program_for(self, task: Task) -> "AgentEpisode":
        return AgentEpisode(self, task)

    def make(self, task: Task) -> Environment:
        return self.inner.make(task)

    def use_policy(self, ask: AskPolicy) -> None:
        self.inner.use_policy(ask)

    @property
    def restarts(self) -> int:
        return self.inner.restarts

    async def score_group(self, task: Task, group: Group) -> None:
        await called(self.inner.score_group, task, group)

    async def close(self) -> None:
        await called(self.inner.close)


class AgentEpisode(Program):
    """An episode: one call of the program."""

    def __init__(self, environments: AgentEnvironments, task: Task) -> None:
        self.environments, self.task = environments, task

    async def run(self, address: Address) -> Step:
        """Return the reward and scores. Raises ``CallError`` after the deadline, and the program's errors."""
        async with self.environments.places:
            return await self._run(address)

    async def _run(self, address: Address) -> Step:
        tasks = self.environments.tasks
        limit = asyncio.timeout(tasks.deadline)
        try:
            async with limit:
                if isinstance(tasks.taskset, TasksInShell):
                    return await self._work(address, tasks.taskset)
                result = await self._solve(address)
        except TimeoutError:
            if not limit.expired():  # an error of the program
                raise
            why = f"{tasks.title} took more than data.deadline = {tasks.deadline:g} s for {self.task.uid}"
            raise CallError(why) from None
        return await self._step(result)

    async def _work(self, address: Address, taskset: TasksInShell) -> Step:
        """Return the step of the files that the command leaves in its working folder."""

        async def graded(place: Path) -> dict[str, float]:
            most = taskset.runtime.limits.disk_mib << 20
            return await taskset.grade_folder(self.task, partial(pack, place, most))

        tasks, to = self.environments.tasks, (self.task, address.base_url, address.api_key)
        if tasks.in_runtime:
            state = await taskset.state(self.task, link_to(address.base_url))
            try:
                inside = partial(tasks.command.work_inside, state.runtime, *to, tasks.deadline)
                await run_in_thread(inside, "whet-agent")
                grade = await taskset.score(self.task, state, "")
            finally:
                await taskset.end(state)  # also what still runs, where the episode was ended early
        else:
            grade = await tasks.command.work(*to, taskset.files(self.task), graded)
        scores = checked_scores(grade, self.task, taskset)
        return Step(scores.pop("reward"), scores=scores)

    async def _solve(self, address: Address) -> object:
        solve, arguments = self.environments.solve, (self.task, address.base_url, address.api_key)
        if inspect.iscoroutinefunction(solve):
            return await solve(*arguments)
        thread = JobThread("whet-agent")
        try:
            return await outcome_of(thread.submit(solve, *arguments))
        finally:
            thread.end()

    async def _step(self, result: object) -> Step:
        """Return the step of the program's result: a text, the reward, or a dict of scores."""
        if isinstance(result, str):
            return await self._grade(result)
        where = f"that {self.environments.tasks.title} returned for {self.task.uid}"  # "the reward that ..."
        alone = {"reward": result} | ({"correct": result} if is_bool(result) else {})
        scores = dict(result) if isinstance(result, Mapping) else alone
        if "reward" not in scores:
            raise DataError(f"the dict {where} has no 'reward', only {', '.join(map(str, scores)) or 'nothing'}")
        checked = {name: checked_score(name, value, where) for name, value in scores.items()}
        return Step(checked.pop("reward"), scores=checked)

    async def _grade(self, answer: str) -> Step:
        """Return the step of the answer as the only reply in an episode of the task set."""
        _, step = await play(self.environments.make(self.task), answer)
        if not step.done:
            kind = type(self.environments.tasks.taskset).__name__
            raise DataError(
                f"{kind} has episodes of several turns, which can't grade a text; return the reward from "
                f"{self.environments.tasks.title} instead"
            )
        return step


def _check_called(solve: Callable[..., object], name: str) -> None:
    """Raise ``ValueError`` for a function that contains ``yield`` or can't be called as ``solve`` is."""
    try:
        check_runs(solve, name)
        inspect.signature(solve).bind("task", "base_url", "api_key")
    except ConfigError as problem:
        raise ValueError(str(problem)) from None
    except TypeError as problem:
        raise ValueError(f"program = {name} must take (task, base_url, api_key): {problem}") from None
    except ValueError:
        pass  # some functions written in C have no signature


def _check_inside(kind: RuntimeKind, program: str) -> None:
    """Raise ``ConfigError`` if a runtime with a link can't be opened, or doesn't have the program."""
    try:
        runtime = kind.open(link=link_to("http://127.0.0.1"))
        try:
            status = runtime.run(f"command -v -- {shlex.quote(program)}").status
        finally:
            runtime.close()
    except RuntimeFailure as problem:
        raise ConfigError(f"in_runtime: the runtime can't be opened with a link to the policy: {problem}") from None
    if status:
        raise ConfigError(
            f"program: the runtime {type(kind).__name__.lower()} has no command {program}. A local runtime has the "
            "programs of the system and what is below runtime.readable, a container the programs of its image"
        )
