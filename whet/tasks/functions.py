"""Rows whose answers a function rewards: the shortest way from data and an idea of what is good to a run.

def right(text: str, answer: str) -> bool:  # what the model says, and a column of the row
    return text.strip().endswith(answer)
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError, DataError
from whet.base.files import write_atomically
from whet.config.component import ComponentError, component_path, import_path
from whet.core.types import Task
from whet.tasks.base import Grade, called
from whet.tasks.prompts import Prompts

_IN_PROCESS: dict[str, Callable[..., Any]] = {}  # functions that cannot be imported: lambdas, those of a notebook


class FunctionTasks(Prompts):
    """The rows of a file as tasks. ``prompt`` is a text or messages; the other columns are for the reward."""

    reward: str
    """The function, as in ``my_rewards:right`` or ``rewards.py:right``. Its first parameter is the model's text; each
    further one without a default names a column, or is ``row`` for all of them as a dict. It may be ``async``, and
    returns a number, a bool, or a dict of scores with the key ``reward``."""

    async def grade(self, task: Task, answer: str) -> Grade:
        return await called(partial(self._function, *self._arguments(task, answer)))

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self.reward in _IN_PROCESS:
            return _IN_PROCESS[self.reward]
        try:
            function = import_path(self.reward)
        except ComponentError as error:
            raise ConfigError(f"data.reward: {error}") from None
        if not callable(function):
            raise ConfigError(f"data.reward: {self.reward} is not a function")
        return function

    @cached_property
    def _parameters(self) -> list[str]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = inspect.signature(self._function).parameters.values()
        return [one.name for one in given if one.kind in kinds and one.default is inspect.Parameter.empty]

    def _arguments(self, task: Task, answer: str) -> list[Any]:
        row = {"prompt": task.prompt, **task.data}
        columns = {"row": row, **row}
        if not self._parameters:
            raise ConfigError(f"the reward function {self.reward} has no parameter for the model's text")
        if missing := [name for name in self._parameters[1:] if name not in columns]:
            raise ConfigError(
                f"the reward function {self.reward} has the parameter {missing[0]!r}, which is neither 'row' nor a "
                f"column; the columns are: {', '.join(row)}"
            )
        return [answer, *(columns[name] for name in self._parameters[1:])]


def name_of(function: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name that ``FunctionTasks.reward`` finds the function by, and whether other processes find it, too.
    Raises ``ConfigError`` for what is not a function."""
    if not callable(function):
        raise ConfigError(f"reward is {function!r}; it must be a function of what the model says")
    if not inspect.isroutine(function):  # an object that can be called
        name, found = f"{type(function).__name__}:{id(function)}", False
    else:
        name = component_path(function)
        found = not name.startswith("__main__:") and "<" not in name
    if not found:
        _IN_PROCESS[name] = function
    return name, found


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows (a list of dicts, a ``datasets.Dataset``, or a DataFrame) as JSONL and return their number. Raises
    ``DataError`` naming the row."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame, which iterates over its columns
        rows = rows.to_dict("records")
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of data is {type(row).__name__}; it must be a dict with a prompt")
        if "prompt" not in row:
            raise DataError(f"row {number} of data has no 'prompt'; it has: {', '.join(map(str, row)) or 'nothing'}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise DataError(f"row {number} of data: {error}") from None
    if not lines:
        raise DataError("data has no rows")
    write_atomically(path, "\n".join(lines) + "\n")
    return len(lines)


def _plain(value: Any) -> Any:
    """Return a numpy value as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is not a value of JSON")
