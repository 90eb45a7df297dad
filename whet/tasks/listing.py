"""The tasks of a task set, checked: a mistake in a ``tasks`` of the user's is named with its place, before it is
met."""

import reprlib
from collections.abc import Mapping, Sequence

from whet.base.errors import DataError, WhetError
from whet.core.roles import problem_of
from whet.core.types import Task
from whet.processes.user_code import place_of, user_lines
from whet.tasks.base import TaskSet

_EXAMPLE = 'Task("sums/1", [{"role": "user", "content": "What is 2 + 2?"}])'
_REMEMBERED = 200_000  # uids that are compared; a task set may have millions


def tasks_of(taskset: TaskSet, split: str) -> Sequence[Task]:
    """Return ``taskset.tasks(split)``. Raises ``DataError`` if it fails, unless these are tasks whose prompts are
    messages, with separate uids, and for a mistyped role."""
    where = place_of(type(taskset), "tasks")
    try:
        tasks: object = taskset.tasks(split)
    except WhetError:
        raise
    except Exception as error:
        raise DataError(f"{where} failed for the split {split!r}:\n{user_lines(error)}") from error
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        raise DataError(f"{where} must return a list of tasks, not {_shown(tasks)}; make a list of an iterator")
    numbers = dict[str, int]()
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise DataError(f"{where} must return a list of tasks, as in [{_EXAMPLE}], and one is {_shown(task)}")
        if not isinstance(task.uid, str):
            raise DataError(f"{where}: the uid of a task must be a text, by which records name it, not {task.uid!r}")
        if not isinstance(task.prompt, list | tuple) or not all(map(is_message, task.prompt)):
            raise DataError(
                f"{where}: the prompt of task {task.uid!r} must be a list of messages, as in {_EXAMPLE}, not "
                f"{_shown(task.prompt)}"
            )
        if problem := next(filter(None, map(problem_of, task.prompt)), None):
            raise DataError(f"{where}: a message of task {task.uid!r} {problem}")
        if number < _REMEMBERED and (first := numbers.setdefault(task.uid, number)) != number:
            raise DataError(
                f"{where}: tasks {first} and {number} of the split {split!r} have the same uid {task.uid!r}, by which "
                "seeds are drawn and records are kept; make it unique"
            )
    return tasks


def is_message(value: object) -> bool:
    """Return whether a value has a role and a content: a text, or a list of parts."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str | list | tuple)
    )


def _shown(value: object) -> str:
    kind = type(value).__name__
    return reprlib.repr(value) if isinstance(value, str | Mapping | Sequence) or value is None else f"a {kind}"
