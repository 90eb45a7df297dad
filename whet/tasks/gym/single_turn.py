"""The check that NeMo Gym can train on a task set: on tasks that one answer ends, graded without whet's own tools."""

from whet.base.errors import ConfigError
from whet.tasks.base import TaskSet
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.judges.config import check_has_no_own_judge


async def check_single_turn(tasks: TaskSet) -> None:
    """Raise ``ConfigError`` if the tasks have tools, and so can't be verified from one answer, or if the policy would
    judge."""
    check_has_no_own_judge(tasks)
    first = next(iter([*tasks.tasks("train")[:1], *tasks.tasks("test")[:1]]), None)
    if first is None:
        raise ConfigError(f"{type(tasks).__name__} has no tasks")
    environments = IsolatedEnvironments(tasks.open())
    try:
        environment = environments.make(first)
        try:
            if (await environment.start()).tools:
                raise ConfigError(
                    f"{type(tasks).__name__} can't be served to NeMo Gym: its tasks need whet's own tools"
                )
        finally:
            await environment.close()
    finally:
        await environments.close()
