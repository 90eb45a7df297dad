"""Environments of verifiers before 0.4 as task sets (``load_environment``, rubrics, ``MultiTurnEnv``, ``ToolEnv``).

An environment's own ``rollout`` runs as a program that calls the model over the endpoint; then its rubric scores it.
"""

import functools
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from pydantic import Field

from whet.base.errors import CallError, ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Message, Task
from whet.data.messages import messages_of
from whet.data.split import Tally
from whet.tasks.base import Address, Environments, Program, Step
from whet.tasks.splits import MAX_SIZE, Split, SplitTasks, question_key, split_train_test

# Errors of a reward function about an answer that it can't read, which earns 0. Other errors are failures.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_raised: ContextVar[list[Exception]] = ContextVar("raised")  # errors of the reward functions of one rollout


@dataclass(frozen=True, slots=True)
class VerifiersRow:
    """A row of the environment's data set."""

    row: JsonObject


class Verifiers(SplitTasks[VerifiersRow]):
    """Tasks of an installed environment of verifiers."""

    environment: str
    """The id of the environment: the name of its module with ``load_environment``, in dashes or underscores."""
    arguments: JsonObject = Field(default={})
    """Arguments of ``load_environment``."""
    test_size: int = Field(default=200, ge=0, le=MAX_SIZE)
    """Most test tasks. They are the environment's rows for evaluation or, without any, held-out training rows."""

    @property
    def has_programs(self) -> bool:
        return True

    def open(self) -> "VerifiersEnvironments":
        return VerifiersEnvironments(self._loaded)

    @cached_property
    def _loaded(self) -> Any:
        """Return the environment of verifiers. Raises ``ConfigError`` if it can't be loaded or rewards whole groups."""
        try:
            import verifiers.envs.environment as module
            from verifiers.utils.env_utils import load_environment
        except ImportError as problem:
            raise ConfigError(f"verifiers is not installed ({problem}): pip install 'verifiers<0.4'") from None
        # Its constructor installs handlers of SIGINT, SIGTERM and the process's exit, which would replace the run's.
        module.signal = module.atexit = SimpleNamespace(signal=_ignore, register=_ignore, SIGINT=None, SIGTERM=None)
        try:
            environment = load_environment(self.environment, **self.arguments)
        except Exception as problem:
            raise ConfigError(f"data.environment: {problem}") from problem
        if environment.rubric.has_group_rewards:
            raise ConfigError(
                f"data.environment: the rubric of {self.environment} rewards the answers of a group together, which is "
                "not supported; use an environment that rewards single answers"
            )
        _record_errors(environment.rubric)
        return environment

    def splits(self) -> dict[Split, list[Task[VerifiersRow]]]:
        name, loaded = f"verifiers/{self.environment}", self._loaded
        train = _read(loaded.build_dataset() or (), f"{name}/train")
        test = _read(loaded.build_eval_dataset() or (), f"{name}/test")
        if not train:
            return {"train": [], "test": test[: self.test_size]}
        tally = Tally(name, len(train) + len(test))
        return split_train_test(
            name, train, test or None, self.test_size, lambda task: question_key(str(task.prompt)), tally
        )


class VerifiersEnvironments(Environments[VerifiersRow]):
    """Episodes of the environment."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def program_for(self, task: Task[VerifiersRow]) -> "Rollout":
        return Rollout(self._loaded, task)

    async def close(self) -> None:
        await self._loaded._teardown()


class Rollout(Program):
    """One episode of the environment."""

    def __init__(self, loaded: Any, task: Task[VerifiersRow]) -> None:
        self.loaded, self.task = loaded, task

    async def run(self, address: Address) -> Step:
        """Return the reward and scores. Raises the error that stopped the rollout, except a tool's, and the first error
        of a reward function that is not about an answer that it can't read."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient
        from verifiers.errors import ToolError

        client = AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0, timeout=3600)
        async with client:
            state = await self.loaded.rollout(self.task.data.row, OpenAIChatCompletionsClient(client), "whet", {})
        if state.get("timed_out"):
            raise CallError(f"{self.task.uid} took more than the environment's timeout_seconds")
        if state["error"] is not None and not isinstance(state["error"], ToolError):
            raise state["error"]
        _raised.set(raised := list[Exception]())
        await self.loaded.rubric.score_rollout(state)
        await self.loaded.rubric.cleanup(state)
        if failures := [error for error in raised if not isinstance(error, _UNREADABLE)]:
            raise failures[0]
        scores = {name: float(value) for name, value in (state["metrics"] or {}).items() if name != "reward"}
        return Step(float(state["reward"]), scores=scores | ({"scorer_error": 1.0} if raised else {}))


def _record_errors(rubric: Any) -> None:
    """Wrap the rubric's reward functions to record their errors, which verifiers replaces by 0."""

    def recorded(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        async def call(*arguments: Any, **named: Any) -> object:
            try:
                result = function(*arguments, **named)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                _raised.get([]).append(error)
                raise

        return call

    for part in getattr(rubric, "rubrics", ()):
        _record_errors(part)
    rubric.funcs[:] = [recorded(function) for function in rubric.funcs]


def _read(rows: Any, name: str) -> list[Task[VerifiersRow]]:
    given = [json.loads(json.dumps(dict(row), default=str)) for row in rows]
    return [Task(f"{name}/{index}", _messages(row["prompt"]), VerifiersRow(row)) for index, row in enumerate(given)]


def _messages(prompt: object) -> list[Message]:
    try:
        return messages_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    except ValueError as problem:
        raise DataError(f"a prompt of the environment {problem}") from None


def _ignore(*_: object) -> None:
    """Install no handler: the run closes the environments."""
