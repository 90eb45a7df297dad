"""Task sets that read a file or, without one, generate tasks from a seed, in two splits without a common question."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Generic

from pydantic import Field, model_validator

from whet.core.content import image_urls, words_of
from whet.core.types import D, Message, Task
from whet.data.split import Tally
from whet.fetch.images import fingerprint
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.prompts import Example, messages
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, draw_splits, question_key, split_files


class SourcedTasks(FileTasks[D], Generic[D], ABC):
    """Base of task sets that read rows (``read``) or generate tasks (``draw``). This class sets the uids."""

    name: ClassVar[str]
    variety: ClassVar[str] = "variety"  # the settings that allow more different tasks, for an error message

    path: str | None = None  # type: ignore[assignment]  # without a file, tasks are generated
    """A JSONL file, here or on the web (``https://...#sha256=...``), or ``hf:name:config:split`` on the Hugging Face
    Hub; None: tasks are generated from ``seed``."""
    train_size: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Most training tasks; the first are used. None: all of a file, or 2,000 generated tasks."""
    seed: int = 0
    system: str | None = None
    examples: tuple[Example, ...] = ()
    """Complete user messages with replies to them, which come before each task as earlier turns."""

    @model_validator(mode="after")
    def _file_settings_have_a_file(self) -> "SourcedTasks":
        if self.path is None and (self.test_path is not None or self.columns):
            raise ValueError("test_path and columns need a path; give one, or remove them to generate tasks")
        return self

    @abstractmethod
    def read(self, path: str) -> list[Task[D]]:
        """Return the tasks of a file's rows. Raises ``DataError`` naming a row that can't be graded."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Task[D]:
        """Return a generated task."""

    def key(self, task: Task[D]) -> int:
        """Return a number that is equal for two tasks with the same question."""
        asked = [message for message in task.prompt if message["role"] == "user"]
        words = [words_of(message["content"]) for message in asked]
        return question_key("\n".join([*words, *map(fingerprint, image_urls(asked))]))

    def answers(self, task: Task[D]) -> Iterable[tuple[Kind, str, str, float]]:
        """Yield answers to a task with known rewards: kind, description, answer, reward."""
        return ()

    def unearned(self, tasks: Sequence[Task[D]]) -> Iterable[Case]:
        """Yield answers to the first task that must earn nothing; by default ``cases.unearned``."""
        return unearned(tasks[0], self.gold(tasks[0]))

    def cases(self) -> Sequence[Case]:
        tasks = self.tasks("train")
        declared = [Case(name, tasks[0], answer, reward, kind) for kind, name, answer, reward in self.answers(tasks[0])]
        return [*declared, *self.unearned(tasks)]

    def splits(self) -> dict[Split, list[Task[D]]]:
        if self.path is None:
            sizes: dict[Split, int] = {"train": self.train_size or 2000, "test": self.test_size}
            drawn = draw_splits(self.name, self.seed, sizes, self.draw, self.key, self.variety)
            return {split: [self._named(task, split, number) for number, task in drawn[split]] for split in drawn}
        splits = split_files(self.name, self.path, self.test_path, self.test_size, self._read, self.key)
        return {"train": splits["train"][: self.train_size], "test": splits["test"]}

    def _read(self, path: str, split: Split, tally: Tally) -> list[Task[D]]:
        tasks = self.read(path)
        tally.rows += len(tasks)
        return [self._named(task, split, number) for number, task in enumerate(tasks)]

    def _named(self, task: Task[D], split: Split, number: int) -> Task[D]:
        return replace(task, uid=f"{self.name}/{split}/{number}")

    def ask(self, question: str) -> list[Message]:
        """Return a prompt that ends in one user message."""
        return messages(self.system, question, self.examples)
