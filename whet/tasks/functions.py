"""Rows of prompts whose answers a user's function rewards.

def right(text: str, answer: str) -> bool:  # the model's answer, and a column of the row
    return text.strip().endswith(answer)
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from whet.base.errors import ConfigError
from whet.config.component import ComponentError, component_path, import_path
from whet.core.types import Task
from whet.processes.user_code import check_runs, is_function, place_of_function
from whet.tasks.base import Grade, called
from whet.tasks.prompts import PromptRow, Prompts
from whet.tasks.splits import Split

_IN_PROCESS: dict[str, Callable[..., Any]] = {}  # functions that cannot be imported, such as lambdas
Parameters = Mapping[str, inspect.Parameter]
_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


class FunctionTasks(Prompts):
    """The rows of a file as tasks. ``prompt`` is a text or messages; the other columns are for the reward."""

    reward: str
    """The function, as in ``my_rewards:right`` or ``rewards.py:right``. Its first parameter gets the model's answer,
    the other ones the columns that they name, or ``row``, a dict of all columns. If the first parameter names one of
    these, the parameter called ``answer`` gets the model's answer. The function may be ``async``, and returns a number,
    a bool, or a dict of scores with the key ``reward``."""

    def splits(self) -> dict[Split, list[Task]]:
        """Return the tasks of both splits. Raises ``ConfigError`` for a function that can't be found, before any row is
        read, and naming a parameter of the function that is not a column of every row."""
        function, parameters = self._function, self._parameters
        splits = super().splits()
        for task in (task for tasks in splits.values() for task in tasks):
            arguments(function, parameters, task, "")
        return splits

    @staticmethod
    def data_of(row: PromptRow) -> dict[str, object]:
        return {**(row.model_extra or {}), **row.given}

    @property
    def graded_by(self) -> str:
        return place_of_function(self._function, f"the reward function {_name(self._function)}")

    async def grade(self, task: Task, answer: str) -> Grade:
        positional, named = arguments(self._function, self._parameters, task, answer)
        return await called(partial(self._function, *positional, **named))

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self.reward in _IN_PROCESS:
            return _IN_PROCESS[self.reward]
        if self.reward.startswith("__main__:") or "<" in self.reward:
            raise ConfigError(
                f"data.reward: {self.reward} was defined in a notebook or inside of a function, so only the process "
                "that defined it can call it; put the function into a file and set data.reward=FILE.py:NAME"
            )
        try:
            function = import_path(self.reward)
        except ComponentError as error:
            hint = "; set data.reward=FILE.py:FUNCTION" if self.reward.startswith("your_") else ""
            raise ConfigError(f"data.reward: {error}{hint}") from None
        if not callable(function):
            raise ConfigError(f"data.reward: {self.reward} is not a function")
        check_runs(function, f"data.reward: {_name(function)}")
        return function

    @cached_property
    def _parameters(self) -> Parameters | None:
        try:
            return inspect.signature(self._function).parameters
        except ValueError:  # a function in C without a signature
            return None

    def warnings(self) -> list[str]:
        if self.reward not in _IN_PROCESS:
            return []
        return [
            f"the reward function {self.reward} is defined in a notebook or inside a function, where `whet eval` and "
            "`whet resume` can't find it; put it into a file and import it"
        ]


def arguments(
    function: Callable[..., object], parameters: Parameters | None, task: Task, answer: str
) -> tuple[list[object], dict[str, object]]:
    """Return the positional and the named arguments of a reward function for an answer to a task. ``parameters``: of
    the function, None if it does not tell them. Raises ``ConfigError`` naming the parameter that has no value."""
    if parameters is None:
        return [answer], {}
    row = {"prompt": task.prompt, **task.columns}
    values = {**row, "row": row}
    name = _name(function)
    names = [key for key, parameter in parameters.items() if parameter.kind in _NAMED]
    receiver = next((key for key in names[:1] if key not in values), "answer")
    if receiver not in names:
        raise ConfigError(
            f"the reward function {name} has no parameter for the model's answer: its parameters are "
            f"({', '.join(names)}), and the columns are {', '.join(row)}; call one of its parameters 'answer'"
        )
    values[receiver] = answer
    positional, named = list[Any](), dict[str, Any]()
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= {key: value for key, value in row.items() if key not in parameters}
        elif parameter.kind is parameter.VAR_POSITIONAL or (
            parameter.name not in values and parameter.default is not parameter.empty
        ):
            continue
        elif parameter.name not in values:
            raise ConfigError(
                f"the reward function {name} has the parameter {parameter.name!r}, which is neither 'row' nor a column "
                f"of {task.uid}; its columns are: {', '.join(row)}"
            )
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(values[parameter.name])
        else:
            named[parameter.name] = values[parameter.name]
    return positional, named


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def name_of(function: Callable[..., object]) -> str:
    """Return the name by which ``FunctionTasks.reward`` finds the function: its path, or, if it can't be imported, a
    name that is valid in this process only. Raises ``ConfigError`` if it can't be called or contains ``yield``."""
    if not callable(function):
        raise ConfigError(f"reward is {function!r}; it must be a function of the model's answer")
    check_runs(function, f"the reward function {_name(function)}")
    path = component_path(function) if is_function(function) else f"<{type(function).__name__}>"
    try:
        if not path.startswith("__main__:") and "<" not in path and import_path(path) is function:
            return path
    except ComponentError:
        pass
    if inspect.isfunction(function) and path == f"__main__:{function.__name__}" and "<" not in path:
        name = path  # a cell that is run again replaces its function
    else:
        taken = [key for key, other in _IN_PROCESS.items() if other == function]
        name = taken[0] if taken else f"<{path.strip('<>')} {len(_IN_PROCESS) + 1}>"
    _IN_PROCESS[name] = function
    return name
