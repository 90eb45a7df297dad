"""The messages of prompts, with solved examples; and a file's prompts as tasks without a grader."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pydantic import Field

from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.core.content import image_urls, words_of
from whet.core.types import Message, Task
from whet.data.forms import conversation
from whet.data.image_rows import with_images
from whet.data.messages import SystemText
from whet.data.row import Row, naming_prep, read_rows
from whet.data.row_kinds import Asked
from whet.data.split import Tally
from whet.fetch.images import fingerprint
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, question_key, split_files


class Example(Config):
    """A solved example: a user message and a reply to it."""

    question: str
    answer: str


def messages(system: str | None, user: str, examples: Sequence[Example] = ()) -> list[Message]:
    """Return the messages of a prompt, with the examples as earlier turns of the conversation."""
    conversation: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for example in examples:
        conversation.append({"role": "user", "content": example.question})
        conversation.append({"role": "assistant", "content": example.answer})
    return [*conversation, {"role": "user", "content": user}]


class PromptRow(Row):
    """A row of ``prompt``, a text or messages, and perhaps the ``system`` text before it. All other fields become the
    task's ``data``. In a row of ``messages`` that ends with a reply, this reply is the field ``completion``, and the
    messages before it the prompt."""

    system: SystemText = None
    prompt: Asked

    @classmethod
    def prepared(cls, values: JsonObject, folder: Path | None) -> JsonObject:
        fields = with_images(values if "prompt" in values else conversation(values), folder)
        if "prompt" in fields or not _is_answered(fields.get("messages")):
            return fields
        *prompt, reply = fields.pop("messages")
        return fields | {"prompt": prompt, "completion": reply.get("content")}


def _is_answered(turns: object) -> bool:
    last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
    return isinstance(last, dict) and last.get("role") == "assistant"


class Prompts(FileTasks):
    """The rows of a file as tasks without a grader: a program, a reward model or a subclass rewards them."""

    test_size: int = Field(default=100, ge=0, le=MAX_SIZE)
    image_folder: str | None = None
    """The folder that paths of images in rows begin at and stay in. None: the folder of their file."""

    def splits(self) -> dict[Split, list[Task]]:
        return split_files("prompts", self.path, self.test_path, self.test_size, self._read, _key)

    def _read(self, path: str, split: Split, tally: Tally) -> list[Task]:
        with naming_prep():
            rows = read_rows(path, PromptRow, self.columns, image_folder=self.image_folder)
        tally.rows += len(rows)
        return [
            Task(f"prompts/{split}/{number}", cast(list[Message], row.prompt), self.data_of(row))
            for number, row in enumerate(rows)
        ]

    @staticmethod
    def data_of(row: PromptRow) -> dict[str, object]:
        """Return the ``data`` of a row's task: by default all columns but ``prompt``."""
        return dict(row.model_extra or {})


def _key(task: Task) -> int:
    words = [words_of(message["content"]) for message in task.prompt]
    return question_key("\n".join([*words, *map(fingerprint, image_urls(task.prompt))]))
