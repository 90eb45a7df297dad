"""Tasks that are read from a file or, without one, drawn from a seed; either way in two splits without a question in
common."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, model_validator

from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.data.split import Tally
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.few_shot import Example, messages
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, draw_splits, question_key, split_files


class SourcedTasks(FileTasks, ABC):
    """Base of task sets that read rows (``read``) and can make tasks up (``draw``). Both leave uids to this class."""

    name: ClassVar[str]
    variety: ClassVar[str] = "variety"  # the settings that allow for more different tasks

    path: str | None = None  # type: ignore[assignment]  # without a file, tasks are made up
    """A JSONL file, here or on the web (``https://...#sha256=...``), or ``hf:name:config:split`` on the Hugging Face
    Hub; None: tasks are made up, from ``seed``."""
    train_size: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """The most training tasks, the first ones; None: all of a file, or 2,000 that are made up."""
    seed: int = 0
    system: str | None = None
    examples: tuple[Example, ...] = ()
    """What the user says, in full, and replies to it, shown before each task as earlier turns."""

    @model_validator(mode="after")
    def _file_settings_have_a_file(self) -> "SourcedTasks":
        if self.path is None and (self.test_path is not None or self.columns):
            raise ValueError("test_path and columns are read with a path only")
        return self

    @abstractmethod
    def read(self, path: str) -> list[Task]:
        """Return the tasks of a file's rows. Raises ``DataError`` naming the row for one that can't be graded."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Task:
        """Return a task that is made up."""

    def key(self, task: Task) -> int:
        """Return a number that is the same for two tasks that ask the same."""
        return question_key(
            "\n".join(text_of(message["content"]) for message in task.prompt if message["role"] == "user")
        )

    def answers(self, task: Task) -> Iterable[tuple[Kind, str, str, float]]:
        """Yield answers to a task whose reward is known: kind, what it tries, answer, reward."""
        return ()

    def unearned(self, tasks: Sequence[Task]) -> Iterable[Case]:
        """Yield answers to the first of some tasks that must earn nothing; by default those of ``cases.unearned``."""
        return unearned(tasks[0], self.gold(tasks[0]))

    def cases(self) -> Sequence[Case]:
        tasks = self.tasks("train")
        declared = [Case(name, tasks[0], answer, reward, kind) for kind, name, answer, reward in self.answers(tasks[0])]
        return [*declared, *self.unearned(tasks)]

    def splits(self) -> dict[Split, list[Task]]:
        if self.path is None:
            sizes: dict[Split, int] = {"train": self.train_size or 2000, "test": self.test_size}
            drawn = draw_splits(self.name, self.seed, sizes, self.draw, self.key, self.variety)
            return {split: [self._named(task, split, number) for number, task in drawn[split]] for split in drawn}
        splits = split_files(self.name, self.path, self.test_path, self.test_size, self._read, self.key)
        return {"train": splits["train"][: self.train_size], "test": splits["test"]}

    def _read(self, path: str, split: Split, tally: Tally) -> list[Task]:
        tasks = self.read(path)
        tally.rows += len(tasks)
        return [self._named(task, split, number) for number, task in enumerate(tasks)]

    def _named(self, task: Task, split: Split, number: int) -> Task:
        return replace(task, uid=f"{self.name}/{split}/{number}")

    def ask(self, question: str) -> list[Message]:
        """Return a prompt that ends in one user message."""
        return messages(self.system, question, self.examples)
