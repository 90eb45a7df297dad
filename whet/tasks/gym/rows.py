"""The tasks of a task set as rows of NeMo Gym, for those who train with Gym."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.base.files import write_atomically
from whet.core.content import text_of
from whet.tasks.base import TaskSet

TASK = "whet_task"  # the field of a row that names its task


def rows(tasks: TaskSet, split: str, agent: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a split as rows of Gym for ``agent``."""
    for task in tasks.tasks(split):
        prompt = [{"role": message["role"], "content": text_of(message["content"])} for message in task.prompt]
        reference = {"type": "responses_api_agents", "name": agent}
        yield {"responses_create_params": {"input": prompt}, "agent_ref": reference, TASK: task.uid}


def write_rows(tasks: TaskSet, split: str, agent: str, path: Path) -> int:
    """Write them to a JSONL file. Return how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(tasks, split, agent)]
    write_atomically(path, "".join(lines).encode())
    return len(lines)
