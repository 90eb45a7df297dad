"""Tasks of a file, for whoever grades them elsewhere: a program, a reward model, a class derived from this one."""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

from pydantic import Field

from whet.core.types import Message, Task
from whet.data.row import Row, read_rows
from whet.data.row_kinds import Asked
from whet.data.split import Tally
from whet.tasks.base import TaskSet
from whet.tasks.problems import Split, known_split, question_key, separate


class Posed(Row):
    """A row of ``prompt``, a text or messages. All other fields become the task's ``data``."""

    prompt: Asked


class Prompts(TaskSet):
    """The rows of a file as tasks, which it doesn't grade itself."""

    path: str
    """A JSONL file, or ``hf:name:config:split`` on the Hugging Face Hub."""
    test_path: str | None = None
    """The same; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=100, ge=0)
    columns: dict[str, str] = Field(default={})
    """What ``prompt`` and other fields are called there, where they have other names."""

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks[known_split(split)]

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        train = self._read(self.path, "train")
        test = self._read(self.test_path, "test") if self.test_path else None
        tally = Tally(f"prompts ({self.path})", len(train) + len(test or []))
        return separate("prompts", train, test, self.test_size, _key, tally)

    def _read(self, path: str, split: Split) -> list[Task]:
        rows = read_rows(path, Posed, self.columns)
        return [
            Task(f"prompts/{split}/{i}", cast(list[Message], row.prompt), dict(row.model_extra or {}))
            for i, row in enumerate(rows)
        ]


def _key(task: Task) -> int:
    return question_key("\n".join(message["content"] for message in task.prompt))
