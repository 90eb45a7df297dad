"""Environments on a separate thread, which the run can abandon: their code may block, exit, fork, or never end, and the
run's event loop still meets its deadlines.

    run's event loop                                        thread of the environments
      episode: await environment.step(reply) ── call ──▶   step → grade → ...
                                             ◀── result ─

The caller sets the time limits of calls.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, cast

from whet.base.errors import DataError
from whet.core.types import Group, Message, Task
from whet.processes.loop_thread import LoopThread, format_error
from whet.processes.user_code import check_runs, place_of
from whet.tasks.base import Address, AskPolicy, Environment, Environments, Observation, Program, Step, called

log = logging.getLogger(__name__)

_CLOSING = 10.0  # seconds in which environments must close
_GIVEN_UP = 2.0  # the same for a failed or cancelled episode, and for environments whose code is blocked
_SLOWEST = 60.0  # the same for an episode that ended well; what blocks the thread meanwhile doesn't count


class IsolatedEnvironments(Environments):
    """The given environments, with all of their code on one thread."""

    def __init__(self, environments: Environments) -> None:
        check_runs(environments.close, f"{type(environments).__name__}.close")  # not when the run ends
        self._environments, self._thread = environments, LoopThread("whet-environments")
        self._endings = _Endings(self._thread)

    def make(self, task: Task) -> "IsolatedEnvironment":
        return IsolatedEnvironment(self._environments, _copied(task), self._thread, self._endings)

    def program_for(self, task: Task) -> "IsolatedProgram | None":
        program = self._environments.program_for(_copied(task))
        return None if program is None else IsolatedProgram(program, self._thread, self._endings)

    def use_policy(self, ask: AskPolicy) -> None:
        """Let the environments ask the policy, which answers in the running event loop."""
        loop = asyncio.get_running_loop()

        async def across(request: str) -> tuple[int, str]:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(request), loop))

        self._environments.use_policy(across)

    async def score_group(self, task: Task, group: Group) -> None:
        result: object = await self._thread.run(self._scored, task, group)
        if result is not None:
            where = place_of(type(self._environments), "score_group")
            raise DataError(f"{where} must set the reward of each of group.episodes and return None, not {result!r}")

    def _scored(self, task: Task, group: Group) -> Awaitable[object]:
        return self._environments.score_group(task, group)

    def blocked_at(self) -> str | None:
        """Return the place of code that blocks the thread, as "FILE:LINE in FUNCTION"; None if none does."""
        return self._thread.blocked_at()

    async def responds(self) -> None:
        """Return once the thread isn't blocked."""
        await self._thread.run(asyncio.sleep, 0)

    @property
    def restarts(self) -> int:
        return self._environments.restarts

    async def close(self) -> None:
        await self._endings.wait()
        seconds = _CLOSING if self.blocked_at() is None else _GIVEN_UP
        try:
            async with asyncio.timeout(seconds):
                await self._thread.run(self._environments.close)
        except TimeoutError:
            log.warning("%s did not close within %g s", type(self._environments).__name__, seconds)
        finally:
            await self._thread.close()


def _copied(task: Task) -> Task:
    """Return the task with a copy of its lists and dicts: an episode may change these, and all episodes begin alike."""
    return replace(task, prompt=_containers(task.prompt), data=_containers(task.data))


def _containers(value: Any) -> Any:
    if type(value) is dict:
        return {name: _containers(each) for name, each in value.items()}
    return [_containers(each) for each in value] if type(value) is list else value


class _Endings:
    """Closes episodes. One that does not close in time is still closing while the run continues, so that neither its
    result nor the error with which it failed waits."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread, self._open, self._slow = thread, set[asyncio.Task[None]](), set[type]()

    async def close(self, episode: Environment | Program, failed: bool) -> None:
        """Close an episode: at most two seconds are waited for one that failed or was cancelled, whose errors of
        closing are only logged."""
        current = asyncio.current_task()
        given_up = failed or (current is not None and current.cancelling() > 0)
        job = asyncio.create_task(self._close(episode, given_up))
        self._open.add(job)
        job.add_done_callback(self._ended)
        while not (await asyncio.wait([job], timeout=_GIVEN_UP if given_up else _SLOWEST))[0]:
            if given_up:
                return
            if self._thread.blocked_at() is None:
                self._warn(type(episode))
                return
        job.result()

    async def wait(self) -> None:
        """Wait at most two seconds for episodes that are still closing."""
        if self._open and self._thread.blocked_at() is None:
            await asyncio.wait(self._open, timeout=_GIVEN_UP)

    async def _close(self, episode: Environment | Program, given_up: bool) -> None:
        try:
            await self._thread.run(episode.close)
        except Exception as error:
            if not given_up:
                raise
            log.info("an episode that failed could not be closed: %s", format_error(error))

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._open.discard(job)
        if not job.cancelled():
            job.exception()  # which asyncio would print if the episode doesn't wait for it

    def _warn(self, kind: type) -> None:
        if kind not in self._slow:
            self._slow.add(kind)
            log.warning("%s has not ended after %g s; its episodes don't wait", place_of(kind, "close"), _SLOWEST)


class IsolatedProgram(Program):
    """An episode that a program of the environments runs."""

    def __init__(self, program: Program, thread: LoopThread, endings: _Endings) -> None:
        self._program, self._thread, self._endings, self._failed = program, thread, endings, True

    async def run(self, address: Address) -> Step:
        step = await self._thread.run(self._program.run, address)
        self._failed = False
        return step

    async def close(self) -> None:
        await self._endings.close(self._program, self._failed)


class IsolatedEnvironment(Environment):
    """An episode of the environments, which is made when it starts."""

    def __init__(self, environments: Environments, task: Task, thread: LoopThread, endings: _Endings) -> None:
        self._environments, self._task, self._thread, self._endings = environments, task, thread, endings
        self._environment: Environment | None = None
        self._failed = False  # by what ``start`` or ``step`` raised

    async def start(self) -> Observation:
        self._failed = True
        observation = await self._thread.run(self._start)
        self._failed = False
        return observation

    async def _start(self) -> Observation:
        made = await called(lambda: cast(Environment | Awaitable[Environment], self._environments.make(self._task)))
        if not isinstance(made, Environment):
            where = place_of(type(self._environments), "make")
            raise DataError(f"{where} must return an object with start, step and close, not {made!r}")
        self._environment = made
        observation = await called(lambda: cast(Observation | Awaitable[Observation], made.start()))
        if not isinstance(observation, Observation):
            raise DataError(f"{place_of(type(made), 'start')} must return an Observation, not {observation!r}")
        return observation

    async def step(self, reply: Message) -> Step:
        assert self._environment is not None, "start comes first"
        self._failed = True
        step = await self._thread.run(self._environment.step, reply)
        if not isinstance(step, Step):
            where = place_of(type(self._environment), "step")
            raise DataError(f"{where} must return a Step, as in Step(reward=1.0, done=True), not {step!r}")
        self._failed = False
        return step

    async def close(self) -> None:
        made = self._environment
        if made is None:
            return
        does_nothing = getattr(made.close, "__func__", None) is Environment.close
        if self._failed or not does_nothing:  # a call to the thread also returns only once cancelled code has ended
            await self._endings.close(made, self._failed)
