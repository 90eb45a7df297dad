"""Environments of verifiers before 0.4 as task sets (``load_environment``, rubrics, ``MultiTurnEnv``, ``ToolEnv``).

Their own ``rollout`` runs unchanged, as a program that calls the model over the endpoint; then their rubric scores it.
"""

import functools
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.core.types import Message, Task
from whet.data.split import Tally
from whet.tasks.base import Address, Environments, Program, Step
from whet.tasks.splits import MAX_SIZE, Split, SplitTasks, question_key, split_train_test

# What a reward function raises over an answer that it can't read, which verifiers counts as 0. All else is a failure.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_raised: ContextVar[list[Exception]] = ContextVar("raised")  # by the reward functions of one rollout


class Verifiers(SplitTasks):
    """An environment of verifiers that is installed."""

    environment: str
    """Its id: the name of the module whose ``load_environment`` makes it, with dashes or underscores."""
    arguments: dict[str, Any] = Field(default={})
    """Of its ``load_environment``."""
    test_size: int = Field(default=200, ge=0, le=MAX_SIZE)
    """Rows to hold out where it has none for evaluation; else at most so many of those."""

    def open(self) -> "VerifiersEnvironments":
        return VerifiersEnvironments(self._loaded)

    @cached_property
    def _loaded(self) -> Any:
        """The environment of verifiers. Raises ``ConfigError`` where it can't be loaded, or compares answers."""
        try:
            import verifiers.envs.environment as module
            from verifiers.utils.env_utils import load_environment
        except ImportError as problem:
            raise ConfigError(f"verifiers is not installed ({problem}): pip install 'verifiers<0.4'") from None
        # Its constructor takes SIGINT, SIGTERM and the exit of the process over; a run has handlers of its own.
        module.signal = module.atexit = SimpleNamespace(signal=_ignore, register=_ignore, SIGINT=None, SIGTERM=None)
        try:
            environment = load_environment(self.environment, **self.arguments)
        except Exception as problem:
            raise ConfigError(f"data.environment: {problem}") from problem
        if environment.rubric.has_group_rewards:
            raise ConfigError(f"data.environment: {self.environment} rewards the answers of a group together; it can't")
        _watch(environment.rubric)
        return environment

    def splits(self) -> dict[Split, list[Task]]:
        name, loaded = f"verifiers/{self.environment}", self._loaded
        train = _read(loaded.build_dataset() or (), f"{name}/train")
        test = _read(loaded.build_eval_dataset() or (), f"{name}/test")
        if not train:
            return {"train": [], "test": test[: self.test_size]}
        tally = Tally(name, len(train) + len(test))
        return split_train_test(
            name, train, test or None, self.test_size, lambda task: question_key(str(task.prompt)), tally
        )


class VerifiersEnvironments(Environments):
    """The environment at work."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def program_for(self, task: Task) -> "Rollout":
        return Rollout(self._loaded, task)

    async def close(self) -> None:
        await self._loaded._teardown()


class Rollout(Program):
    """One episode of the environment."""

    def __init__(self, loaded: Any, task: Task) -> None:
        self.loaded, self.task = loaded, task

    async def run(self, address: Address) -> Step:
        """Raises what stopped the rollout, unless the model is to blame, and what a reward function raises over
        anything but an answer that it can't read."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient
        from verifiers.errors import ToolError

        async with AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0, timeout=3600) as own:
            state = await self.loaded.rollout(self.task.data["row"], OpenAIChatCompletionsClient(own), "whet", {})
        if state.get("timed_out"):
            raise TimeoutError(f"{self.task.uid}: the environment's timeout_seconds are over")
        if state["error"] is not None and not isinstance(state["error"], ToolError):
            raise state["error"]
        _raised.set(raised := list[Exception]())
        await self.loaded.rubric.score_rollout(state)
        await self.loaded.rubric.cleanup(state)
        if failures := [error for error in raised if not isinstance(error, _UNREADABLE)]:
            raise failures[0]
        scores = {name: float(value) for name, value in (state["metrics"] or {}).items() if name != "reward"}
        return Step(float(state["reward"]), scores=scores | ({"scorer_error": 1.0} if raised else {}))


def _watch(rubric: Any) -> None:
    """Note what its reward functions raise, which verifiers makes a 0."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*arguments: Any, **named: Any) -> Any:
            try:
                found = function(*arguments, **named)
                return await found if inspect.isawaitable(found) else found
            except Exception as error:
                _raised.get([]).append(error)
                raise

        return call

    for one in getattr(rubric, "rubrics", ()):
        _watch(one)
    rubric.funcs[:] = [watched(function) for function in rubric.funcs]


def _read(rows: Any, name: str) -> list[Task]:
    given = [json.loads(json.dumps(dict(row), default=str)) for row in rows]
    return [Task(f"{name}/{index}", _messages(row["prompt"]), {"row": row}) for index, row in enumerate(given)]


def _messages(prompt: Any) -> list[Message]:
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if any(not isinstance(one.get("content"), str) for one in said):
        raise DataError("a prompt of the environment holds more than text")
    return [{"role": one["role"], "content": one["content"]} for one in said]


def _ignore(*_: Any) -> None:
    """Whoever opens environments closes them."""
