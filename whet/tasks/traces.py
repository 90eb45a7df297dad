"""Conversations in which a task set's own tasks are solved, to learn from before the policy solves them itself."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

from pydantic import Field

from whet.base.errors import DataError
from whet.config import Component
from whet.core.types import Task
from whet.data.row_kinds import Conversation, Example
from whet.data.rows import SupervisedRows
from whet.tasks.base import Environments, TaskSet, called
from whet.tasks.cases import Answer
from whet.tasks.play import play
from whet.tasks.registry import TASK_SETS


class Traces(SupervisedRows):
    """The right answers that a task set knows (its ``gold``), each played in its environment, so that the results of
    tools stand in it as the policy will see them."""

    path: Literal["gold"] = "gold"
    taskset: Annotated[TaskSet, Component(TASK_SETS)]
    """Whose tasks."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many tasks to learn from, the first ones."""

    def read(self) -> tuple[Sequence[Example], Sequence[Example]]:
        """Raises ``DataError`` where none is known, or one doesn't earn full marks."""
        tasks = self.taskset.tasks("train")[: self.limit], self.taskset.tasks("test")[: self.test_size]
        with ThreadPoolExecutor(1, "traces") as thread:  # an event loop may be running on this one
            train, test = thread.submit(asyncio.run, _played(self.taskset, *tasks)).result()
        if not train:
            raise DataError(f"{type(self.taskset).__name__} knows no right answer: define its gold()")
        return train, test


async def _played(taskset: TaskSet, *splits: Sequence[Task]) -> list[list[Example]]:
    environments = taskset.open()
    try:
        return [
            [await _conversation(environments, task, gold) for task, gold in _known(taskset, tasks)] for tasks in splits
        ]
    finally:
        await called(environments.close)


def _known(taskset: TaskSet, tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
    for task in tasks:
        if (gold := taskset.gold(task)) is not None:
            yield task, gold


async def _conversation(environments: Environments, task: Task, gold: Answer) -> Conversation:
    observation, episode = await play(environments.make(task), gold)
    if (marks := episode.scores.get("correct", episode.reward)) < 1:  # the scale of rewards differs between task sets
        raise DataError(f"the right answer to task {task.uid!r} earns {marks:g}; `whet validate` says more")
    messages = [*observation.messages, *episode.messages]
    return Conversation.of(task.uid, {"messages": messages, "tools": observation.tools})
