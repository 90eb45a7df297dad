"""Tasks of a file that are graded elsewhere: by a program, a reward model, or a class derived from this one."""

from typing import Any, cast

from pydantic import Field

from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.data.row import Row, read_rows
from whet.data.row_kinds import Asked
from whet.data.split import Tally
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, question_key, split_files


class Posed(Row):
    """A row of ``prompt``, a text or messages. All other fields become the task's ``data``."""

    prompt: Asked


class Prompts(FileTasks):
    """The rows of a file as tasks, which it doesn't grade itself."""

    test_size: int = Field(default=100, ge=0, le=MAX_SIZE)

    def splits(self) -> dict[Split, list[Task]]:
        return split_files("prompts", self.path, self.test_path, self.test_size, self._read, _key)

    def _read(self, path: str, split: Split, tally: Tally) -> list[Task]:
        rows = read_rows(path, Posed, self.columns)
        tally.rows += len(rows)
        return [
            Task(f"prompts/{split}/{number}", cast(list[Message], row.prompt), self.data_of(row))
            for number, row in enumerate(rows)
        ]

    @staticmethod
    def data_of(row: Posed) -> dict[str, Any]:
        """Return the ``data`` of a row's task: by default all columns but ``prompt``."""
        return dict(row.model_extra or {})


def _key(task: Task) -> int:
    return question_key("\n".join(text_of(message["content"]) for message in task.prompt))
