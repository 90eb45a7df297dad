"""Cases in a JSONL file, as ``whet attack`` writes them and ``whet validate --cases`` grades them."""

import json
from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.data.row import Row, read_rows
from whet.tasks.base import TaskSet
from whet.tasks.cases import Case, Kind
from whet.tasks.listing import tasks_of


class CaseRow(Row):
    """A row: the uid of the task, and the fields of the case."""

    name: str
    task: str
    answer: str | list[JsonObject]
    expected: float
    kind: Kind


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write the cases, one in each line."""
    rows = [
        {"name": case.name, "task": case.task.uid, "answer": case.answer, "expected": case.expected, "kind": case.kind}
        for case in cases
    ]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_cases(path: str, taskset: TaskSet) -> list[Case]:
    """Return the cases of a file. Raises ``DataError`` naming the row of a task that the task set doesn't have."""
    tasks = {task.uid: task for split in ("train", "test") for task in tasks_of(taskset, split)}
    rows = read_rows(path, CaseRow)
    for row in rows:
        if row.task not in tasks:
            raise DataError(
                f"{row.where}: {type(taskset).__name__} has no task {row.task!r}; give the settings with which the "
                "case was written"
            )
    return [Case(row.name, tasks[row.task], row.answer, row.expected, row.kind) for row in rows]  # type: ignore[arg-type]
