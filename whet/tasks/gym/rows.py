"""Rows of NeMo Gym: the base of the rows that task sets read, and a task set's tasks written as rows for Gym.

A row holds its prompt, or in ``responses_create_params`` a conversation of OpenAI's Responses API.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.core.content import text_of
from whet.core.types import Message
from whet.data.messages import messages_of, read_by
from whet.data.row import Row, Text, missing
from whet.tasks.base import TaskSet
from whet.tasks.listing import tasks_of
from whet.tasks.prompts import messages

TASK = "whet_task"  # the field of a row that names its task
_ROLES = {"developer": "system"}


def messages_of_parameters(value: object) -> list[Message]:
    """Return the messages of ``responses_create_params``. Its ``input`` is a text or a list of messages, whose contents
    are texts or parts."""
    items = value.get("input") if isinstance(value, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) and "role" in item for item in items):
        raise ValueError("must be an object whose 'input' is a text or a list of messages")
    conversation = messages_of([item | {"role": _ROLES.get(item["role"], item["role"])} for item in items])
    if not any(message["role"] == "user" and text_of(message["content"]).strip() for message in conversation):
        raise ValueError("must contain a user message with a text")
    return conversation


class GymRow(Row):
    """Base of rows with a prompt."""

    prompt: Text | None = None
    responses_create_params: Annotated[list[Message], read_by(messages_of_parameters)] | None = None

    @property
    def conversation(self) -> list[Message] | None:
        return self.responses_create_params

    def shown(self, system: str | None) -> list[Message]:
        """Return the conversation, or the prompt after ``system``. Raises ``DataError`` without either."""
        if self.conversation is None and self.prompt is None:
            raise DataError(f"{self.where}: {missing('prompt', self.model_fields_set)}")
        return self.conversation or messages(system, self.prompt or "")


def rows(tasks: TaskSet, split: str, agent: str) -> Iterator[JsonObject]:
    """Yield the tasks of a split as rows of Gym for ``agent``."""
    for task in tasks_of(tasks, split):
        prompt = [{"role": message["role"], "content": text_of(message["content"])} for message in task.prompt]
        reference = {"type": "responses_api_agents", "name": agent}
        yield {"responses_create_params": {"input": prompt}, "agent_ref": reference, TASK: task.uid}


def write_rows(tasks: TaskSet, split: str, agent: str, path: Path) -> int:
    """Write the rows of a split to a JSONL file and return their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(tasks, split, agent)]
    write_atomically(path, "".join(lines).encode())
    return len(lines)
