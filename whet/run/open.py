"""A run whose loop is the caller's: everything that a recipe names is built, and the steps are left to a script or a
notebook. ``whet.open`` is its face."""

import asyncio
import inspect
import reprlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from whet.base.errors import ConfigError, DataError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.checkpoint.lock import run_lock
from whet.config import dump_yaml
from whet.core.types import Task
from whet.data.order import TaskOrder
from whet.data.source import Source
from whet.learner.base import Update
from whet.lineage.reading import record_run
from whet.metrics import Metrics
from whet.processes.compute import compute, computing
from whet.run.folder import create
from whet.run.interrupts import wait_for
from whet.run.log import logging_to
from whet.run.machine import decide_run
from whet.run.policy import Policy
from whet.run.recipe import Recipe
from whet.run.run import open_run
from whet.run.steps import Run
from whet.tasks.base import TaskSet
from whet.tasks.listing import tasks_of


class Tasks(Sequence[Task]):
    """The training tasks. ``next`` draws them in the recipe's order: shuffled, epoch after epoch."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks, self._order = tasks, TaskOrder(len(tasks), seed)

    def next(self, n: int) -> list[Task]:
        """Return the next ``n`` tasks."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise DataError(f"next returns n tasks, and n is {n!r}; give a whole number from 1 on")
        return [self._tasks[self._order.next()] for _ in range(n)]

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        return self._tasks[index]


class OpenRun:
    """A run that is open: its policy, its tasks and its folder."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self._run, self.recipe, self.folder = run, recipe, run.folder
        self._tasks = Tasks(tasks_of(recipe.data, "train"), recipe.seed) if isinstance(recipe.data, TaskSet) else None

    @property
    def policy(self) -> Policy:
        return self._run.policy

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The recipe's further policies, by name. ``sample`` of any policy plays with all of them; each makes batches
        of what its own roles did, and is updated and published by itself."""
        return {policy.name: policy for policy in self._run.further}

    @property
    def tasks(self) -> Tasks:
        """The training tasks. Raises ``ConfigError`` where the recipe learns from rows; ``source`` has those."""
        if self._tasks is None:
            raise ConfigError("this recipe learns from rows, so it has no tasks: use run.source.next_groups()")
        return self._tasks

    @property
    def source(self) -> Source:
        """The groups of a step as the recipe draws them: sampled and filtered, or rows."""
        return self._run.source

    async def evaluate(self, step: int = 0) -> dict[str, float]:
        """Measure the policy as the generator has it on the held-out tasks or rows, as the recipe's ``evaluation``
        says, and write the result into the metrics."""
        values = await self._run.feed.evaluate(self._run.scorers)
        if values:
            self._run.sinks.write(step, values, kind="evaluation")
        return values

    def log(self, step: int, *stats: Update | Metrics | Mapping[str, float]) -> JsonObject:
        """Write the metrics of a step, counted from 1: the policy's since the last call, the results of updates, and
        further numbers by name. Return them. The report shows them from its next refresh on."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise DataError(f"log takes the number of a step, not {step!r}")
        updates = Metrics()
        numbers: dict[str, float] = {}
        for each in stats:
            if isinstance(each, Mapping):
                numbers |= {str(name): _number(name, value) for name, value in each.items()}
            elif isinstance(each, Update | Metrics):
                updates.merge(each.metrics if isinstance(each, Update) else each)
            else:
                raise DataError(f"log takes results of updates and dicts of numbers, not a {type(each).__name__}")
        if self._run.sinks.closed:
            raise ConfigError("log: the run is closed; call it inside of the run's `with` block")
        metrics, self.policy.metrics = self.policy.metrics, Metrics()
        values = metrics.join(updates).result() | numbers | self._run.clock.lap()
        self._run.sinks.write(step, values)
        return values


def _number(name: object, value: object) -> float:
    """Return the metric of a user as a float, which may be nan. Raises ``DataError`` for anything but a number."""
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            return float(value)  # type: ignore[arg-type]  # also of numpy and torch
    raise DataError(f"the metric {name} is {reprlib.repr(value)}; it must be a number")


@asynccontextmanager
async def opened(
    recipe: Recipe,
    folder: Path,
    while_loading: AbstractContextManager[object],
    while_open: AbstractContextManager[object],
) -> AsyncIterator[OpenRun]:
    """Build everything, publish the first weights, and shut everything down at the end. The two contexts show the run
    to people."""
    create(folder)
    folder = folder.absolute()
    with run_lock(folder), logging_to(folder), while_open, computing():
        async with AsyncExitStack() as stack:
            with while_loading:
                decided = await compute(decide_run, recipe, folder, False)
                write_atomically(folder / "recipe.yaml", dump_yaml(decided))
                run = await stack.enter_async_context(open_run(decided, folder, resuming=False))
                await compute(record_run, decided, folder, decided.seed)
                await stack.enter_async_context(run.source)
                run.scorers = await run.feed.prepare(run.learners, folder, range(run.recipe.steps))
                for policy in run.policies:
                    await policy.publish(0)
            run.clock.start()
            yield OpenRun(run, run.recipe)


class Opening:
    """Result of ``whet.open``, for ``async with`` or, where nothing can be awaited, plain ``with``."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        while_loading: AbstractContextManager[object],
        while_open: AbstractContextManager[object],
    ) -> None:
        self._open = partial(opened, recipe, folder, while_loading, while_open)
        self._stack = AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> OpenRun:
        return await self._stack.enter_async_context(self._open())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def __enter__(self) -> "Blocking":
        """Return an ``OpenRun`` whose methods block until they are done: its event loop runs on a thread, so that this
        works in a notebook, too. An interrupt ends the method that runs; the run stays open until the block ends."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-open", daemon=True)
        self._thread.start()
        try:
            return Blocking(wait_for(self.__aenter__(), self._loop), self._loop)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._loop is not None
        try:
            wait_for(self.__aexit__(kind, error, at), self._loop)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            if not self._loop.is_running():  # code that blocks the loop is abandoned
                self._loop.close()


class Blocking:
    """An object of an open run whose coroutine methods block, for code that cannot await."""

    def __init__(self, target: object, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if inspect.iscoroutinefunction(value):

            def blocking(*args: object, **named: object) -> object:
                if not self._loop.is_running():  # it would never answer
                    raise ConfigError(f"{name}: the run is closed; call it inside of the run's `with` block")
                return wait_for(value(*args, **named), self._loop)

            return blocking
        if name == "policies":
            return {key: Blocking(policy, self._loop) for key, policy in value.items()}
        return Blocking(value, self._loop) if name in ("policy", "source") else value

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_target", "_loop"):
            super().__setattr__(name, value)
        else:
            setattr(self._target, name, value)

    def __dir__(self) -> list[str]:
        return dir(self._target)
