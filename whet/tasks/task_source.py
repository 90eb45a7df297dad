"""Tasks that come from a file or, without one, from a seed; in both cases in two splits that share no question."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from pydantic import Field, model_validator

from whet.base.seeds import derive_seed
from whet.core.types import Message, Task
from whet.data.split import Tally
from whet.tasks.base import TaskSet
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.problems import Example, Split, draw_distinct, known_split, messages, question_key, separate


class SourcedTasks(TaskSet, ABC):
    """Base of task sets that read rows (``read``) and can make tasks up (``draw``). Both leave uids to this class."""

    name: ClassVar[str]
    variety: ClassVar[str] = "variety"  # the settings that allow for more different tasks

    path: str | None = None
    """A JSONL file, here or on the web (``https://...#sha256=...``), or ``hf:name:config:split`` on the Hugging Face
    Hub; None: tasks are made up, from ``seed``."""
    test_path: str | None = None
    """The same; None: test_size rows of ``path`` are held out."""
    columns: dict[str, str] = Field(default={})
    """What the fields are called there, where they have other names."""
    train_size: int | None = Field(default=None, ge=1, le=10_000_000)
    """At most so many training tasks, the first ones; None: all of a file, or 2,000 that are made up."""
    test_size: int = Field(default=200, ge=0, le=10_000_000)
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
        """Make a task up."""

    def key(self, task: Task) -> int:
        """Return a number that is the same for two tasks that ask the same."""
        return question_key("\n".join(message["content"] for message in task.prompt if message["role"] == "user"))

    def answers(self, task: Task) -> Iterable[tuple[Kind, str, str, float]]:
        """Yield answers to a task whose reward is known: kind, what it tries, answer, reward."""
        return ()

    def unearned(self, tasks: Sequence[Task]) -> Iterable[Case]:
        """Yield answers to the first of some tasks that must earn nothing; by default those of ``cases.unearned``."""
        return unearned(tasks[0], self.gold(tasks[0]))

    def cases(self) -> Sequence[Case]:
        tasks = self.tasks("train")
        own = [Case(name, tasks[0], answer, reward, kind) for kind, name, answer, reward in self.answers(tasks[0])]
        return [*own, *self.unearned(tasks)]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks[known_split(split)]

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        if self.path is None:
            test = self._drawn("test", self.test_size, [])
            return {"train": self._drawn("train", self.train_size or 2000, test), "test": test}
        train, test_rows = (
            self._read(self.path, "train"),
            self._read(self.test_path, "test") if self.test_path else None,
        )
        tally = Tally(f"{self.name} ({self.path})", len(train) + len(test_rows or []))
        both = separate(self.name, train, test_rows, self.test_size, self.key, tally)
        return {"train": both["train"][: self.train_size], "test": both["test"]}

    def _read(self, path: str, split: Split) -> list[Task]:
        return [replace(task, uid=f"{self.name}/{split}/{index}") for index, task in enumerate(self.read(path))]

    def _drawn(self, split: Split, size: int, apart_from: list[Task]) -> list[Task]:
        rng = random.Random(derive_seed(self.seed, self.name, split))

        def draw(index: int) -> Task:
            return replace(self.draw(rng), uid=f"{self.name}/{split}/{index}")

        return draw_distinct(f"{self.name}/{split}", draw, size, self.key, apart_from, self.variety)

    def ask(self, question: str) -> list[Message]:
        """A prompt that ends in one user message."""
        return messages(self.system, question, self.examples)
