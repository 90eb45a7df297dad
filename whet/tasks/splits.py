"""Task sets in two splits, generated from a seed or read from files. All questions of both splits differ.

``SplitTasks`` is the common base; ``DrawnTasks`` and ``FileTasks`` add the settings of each origin.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Generic, Literal, TypeVar, cast, get_args

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.core.types import D, Task
from whet.core.words import composed
from whet.data.split import Key, Tally, distinct, hold_out
from whet.tasks.base import TaskSet

Split = Literal["train", "test"]
MAX_SIZE = 10_000_000  # tasks of one split
T = TypeVar("T")


class SplitTasks(TaskSet[D], Generic[D], ABC):
    """Base of task sets that make the tasks of both splits together, once. Subclasses define ``splits``."""

    test_size: int = Field(default=200, ge=0, le=MAX_SIZE)
    """Test tasks to generate or, with a file, the most to use."""

    @abstractmethod
    def splits(self) -> Mapping[Split, Sequence[Task[D]]]:
        """Return the tasks of both splits. Called once."""

    def tasks(self, split: str) -> Sequence[Task[D]]:
        return self._splits[checked_split(split)]

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Task[D]]]:
        return self.splits()


class DrawnTasks(SplitTasks[D], Generic[D], ABC):
    """Base of task sets that are generated from a seed: they need no download, and can have any size."""

    train_size: int = Field(default=2000, ge=1, le=MAX_SIZE)
    """Training tasks to generate."""
    seed: int = 0

    @property
    def sizes(self) -> dict[Split, int]:
        """Return the number of tasks in each split."""
        return {"train": self.train_size, "test": self.test_size}


class FileTasks(SplitTasks[D], Generic[D], ABC):
    """Base of task sets that are rows of files."""

    path: str
    """A JSONL file, or ``hf:name:config:split`` on the Hugging Face Hub."""
    test_path: str | None = None
    """A file of test tasks; None: ``test_size`` rows of ``path`` are held out."""
    columns: dict[str, str] = Field(default={})
    """Columns of the file with other names than the fields, as in ``{answer: solution}``."""


def checked_split(split: str) -> Split:
    """Return the split. Raises ``DataError`` for another name."""
    if split not in get_args(Split):
        raise DataError(f"there is no split {split!r}; known: {', '.join(get_args(Split))}")
    return cast(Split, split)


def question_key(question: str) -> int:
    """Return a number that is equal for two questions that differ only in letter case, spacing and how accents are
    encoded."""
    return derive_seed("held out", " ".join(composed(question).split()).casefold())


def draw_splits(
    name: str, seed: int, sizes: Mapping[Split, int], draw: Callable[[random.Random], T], key: Key[T], variety: str
) -> dict[Split, list[tuple[int, T]]]:
    """Return the tasks of both splits, all with different keys, each with the number of its draw.

    Raises ``ConfigError`` if too few tasks differ; ``variety`` names the settings that allow more.
    """
    taken = set[int]()
    drawn = dict[Split, list[tuple[int, T]]]()
    for split in ("test", "train"):
        rng, size = random.Random(derive_seed(seed, name, split)), sizes[split]
        drawn[split] = draw_distinct(partial(draw, rng), size, key, taken)
        if len(drawn[split]) < size:
            raise ConfigError(
                f"{name}: only {len(drawn[split])} different {split} tasks in {_most_draws(size)} draws, but "
                f"{split}_size is {size}; lower {split}_size, or allow more {variety}"
            )
    return drawn


def draw_distinct(draw: Callable[[], T], size: int, key: Key[T], taken: set[int]) -> list[tuple[int, T]]:
    """Return up to ``size`` tasks whose keys are not in ``taken``, each with the number of its draw, and add their keys
    to ``taken``. Fewer are returned if too many draws repeat a key."""
    drawn = list[tuple[int, T]]()
    for number in range(_most_draws(size)):
        if len(drawn) == size:
            break
        task = draw()
        if (task_key := key(task)) not in taken:
            taken.add(task_key)
            drawn.append((number, task))
    return drawn


def _most_draws(size: int) -> int:
    return 4 * size + 100


def split_files(
    name: str,
    path: str,
    test_path: str | None,
    test_size: int,
    read: Callable[[str, Split, Tally], list[T]],
    key: Key[T],
) -> dict[Split, list[T]]:
    """Return the tasks of one or two files, in two splits without a common key. ``read`` returns the tasks of a file's
    rows, and counts read and dropped rows in the tally."""
    tally = Tally(f"{name} ({path})", 0)
    train = read(path, "train", tally)
    test = read(test_path, "test", tally) if test_path else None
    return split_train_test(name, train, test, test_size, key, tally)


def split_train_test(
    name: str, train: list[T], test: list[T] | None, test_size: int, key: Key[T], tally: Tally
) -> dict[Split, list[T]]:
    """Return distinct tasks in two splits without a common key. With ``test`` None, ``test_size`` of ``train`` are held
    out; otherwise ``test_size`` limits ``test``. ``tally`` counts the rows of both files.

    Raises ``ConfigError`` if more than half would be held out, and ``DataError`` if no training task remains.
    """
    train = distinct(train, key, tally)
    if test is None and test_size * 2 > len(train):
        raise ConfigError(
            f"{name}: test_size={test_size} would hold out more than half of {len(train)} rows; "
            "lower test_size or give test_path"
        )
    test = None if test is None else distinct(test, key, tally)
    train, test = hold_out(train, test, test_size, key, tally)
    tally.report(len(train) + len(test))
    if not train:
        raise DataError(f"{name}: no training task remains after the test questions are removed from the file")
    return {"train": train, "test": test}
