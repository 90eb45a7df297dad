"""Short tasks for a shell, drawn from a seed: count, sort, filter, sum, rename, move, replace. The files that must be
in the work folder at the end are computed here, without a shell."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.shell.base import FILES_SCORES, Files, FileTasksInShell
from whet.tasks.tools.base import solution

Kind = Literal[
    "count", "column", "sort", "filter", "sum", "first", "unique", "rename", "delete", "move", "replace", "join"
]
_WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
    "ladder", "market", "needle", "orange", "pencil", "quarry", "ribbon", "saddle", "timber", "valley", "window",
)  # fmt: skip
_SUFFIXES = ("txt", "log", "csv", "md", "dat", "cfg")


@dataclass
class _Draft:
    """A task while it is drawn: the files before, the files after, and a command that does it."""

    question: str
    before: dict[str, str]
    command: str
    added: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    @property
    def after(self) -> dict[str, str]:
        kept = {path: text for path, text in self.before.items() if path not in self.removed}
        return kept | self.added


class ShellTasks(FileTasksInShell):
    """Write the number of lines of forest.txt to count.txt. Solved by one command."""

    named_scores = FILES_SCORES

    system: str | None = "Use bash to do the task in the current folder. Then answer: done"
    kinds: tuple[Kind, ...] = Field(
        default=(
            "count",
            "column",
            "sort",
            "filter",
            "sum",
            "first",
            "unique",
            "rename",
            "delete",
            "move",
            "replace",
            "join",
        ),
        min_length=1,
    )
    """The tasks that occur."""
    lines: int = Field(default=8, ge=3, le=1000)
    """Most lines of a file; of a file whose lines are counted, twelve times as many."""

    def draw(self, rng: random.Random) -> tuple[str, Files]:
        draft = _DRAWS[rng.choice(self.kinds)](rng, self.lines)
        return draft.question, Files(draft.before, draft.after, draft.command)

    def gold(self, task: Task[Files]) -> Answer:
        return solution(("bash", {"command": task.data.command}), answer="done")


def _text(lines: Sequence[object]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _words(rng: random.Random, most: int) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(3, most))]


def _numbers(rng: random.Random, most: int) -> list[int]:
    """Return numbers whose order as numbers is neither the given one, nor its reverse, nor that of their texts."""
    while True:
        numbers = [rng.randrange(10 ** rng.randint(1, 3)) for _ in range(rng.randint(3, most))]
        ordered = sorted(numbers)
        if ordered not in (numbers, numbers[::-1], sorted(numbers, key=str)):
            return numbers


def _read(rng: random.Random, lines: Sequence[object]) -> tuple[dict[str, str], str, str]:
    """Return two files, the name of the one with these lines, and a name for the file to write. The other file has the
    same lines in another order and one more, so that a command on all files is wrong."""
    stems = rng.sample(_WORDS, 3)
    given, other = (f"{stem}.{rng.choice(_SUFFIXES)}" for stem in stems[:2])
    return {given: _text(lines), other: _text([*rng.sample(lines, len(lines)), "other"])}, given, f"{stems[2]}.txt"


def _count(rng: random.Random, most: int) -> _Draft:
    lines = [rng.choice(_WORDS) for _ in range(rng.randint(3, 12 * most))]  # with a few lines, guesses are often right
    before, given, made = _read(rng, lines)
    question = f"Write the number of lines of {given} to {made}."
    return _Draft(question, before, f"wc -l < {given} > {made}", {made: f"{len(lines)}\n"})


def _column(rng: random.Random, most: int) -> _Draft:
    rows, column = [[rng.choice(_WORDS) for _ in range(5)] for _ in range(rng.randint(3, most))], rng.randint(1, 5)
    before, given, made = _read(rng, [",".join(row) for row in rows])
    question = f"The columns of {given} are separated by commas. Write column {column} to {made}."
    return _Draft(
        question, before, f"cut -d, -f{column} {given} > {made}", {made: _text([row[column - 1] for row in rows])}
    )


def _sort(rng: random.Random, most: int) -> _Draft:
    before, given, made = _read(rng, numbers := _numbers(rng, most))
    question = f"Write the numbers of {given} to {made}, the smallest first."
    return _Draft(question, before, f"sort -n {given} > {made}", {made: _text(sorted(numbers))})


def _filter(rng: random.Random, most: int) -> _Draft:
    word, *others = rng.sample(_WORDS, rng.randint(2, min(most - 1, len(_WORDS))))
    lines = [f"{each} {rng.randrange(100)}" for each in rng.sample([word, word, *others], len(others) + 2)]
    before, given, made = _read(rng, lines)
    question = f"Write the lines of {given} that contain {word} to {made}."
    added = {made: _text([line for line in lines if word in line])}
    return _Draft(question, before, f"grep {word} {given} > {made}", added)


def _sum(rng: random.Random, most: int) -> _Draft:
    before, given, made = _read(rng, numbers := _numbers(rng, most))
    question = f"Write the sum of the numbers in {given} to {made}."
    command = f"awk '{{s += $1}} END {{print s}}' {given} > {made}"
    return _Draft(question, before, command, {made: f"{sum(numbers)}\n"})


def _first(rng: random.Random, most: int) -> _Draft:
    count = rng.randint(2, most - 1)
    lines = [rng.choice(_WORDS) for _ in range(rng.randint(count + 1, most))]
    before, given, made = _read(rng, lines)
    question = f"Write the first {count} lines of {given} to {made}."
    return _Draft(question, before, f"head -n {count} {given} > {made}", {made: _text(lines[:count])})


def _unique(rng: random.Random, most: int) -> _Draft:
    lines = _words(rng, most)
    before, given, made = _read(rng, [*lines, lines[0]])
    question = f"Write the different lines of {given} to {made}, sorted, each once."
    return _Draft(question, before, f"sort -u {given} > {made}", {made: _text(sorted(set(lines)))})


def _files(rng: random.Random, most: int) -> tuple[dict[str, str], list[str], str]:
    """Return several files, the stems of the ones with a common suffix, and that suffix."""
    suffix, *others = rng.sample(_SUFFIXES, 3)
    stems = rng.sample(_WORDS, rng.randint(4, 6))
    chosen = stems[: rng.randint(2, 3)]
    names = [f"{stem}.{suffix if stem in chosen else rng.choice(others)}" for stem in stems]
    return {name: _text(_words(rng, most)) for name in names}, chosen, suffix


def _rename(rng: random.Random, most: int) -> _Draft:
    before, stems, suffix = _files(rng, most)
    new = rng.choice([other for other in ("old", "bak", "new") if other != suffix])
    question = f"Rename all files that end in .{suffix} so that they end in .{new} instead."
    command = f"for f in *.{suffix}; do mv $f ${{f%.{suffix}}}.{new}; done"
    added = {f"{stem}.{new}": before[f"{stem}.{suffix}"] for stem in stems}
    return _Draft(question, before, command, added, tuple(f"{stem}.{suffix}" for stem in stems))


def _delete(rng: random.Random, most: int) -> _Draft:
    before, stems, suffix = _files(rng, most)
    removed = tuple(f"{stem}.{suffix}" for stem in stems)
    return _Draft(f"Delete all files that end in .{suffix}.", before, f"rm *.{suffix}", removed=removed)


def _move(rng: random.Random, most: int) -> _Draft:
    before, stems, suffix = _files(rng, most)
    folder = rng.choice([word for word in _WORDS if word not in stems])
    names = tuple(f"{stem}.{suffix}" for stem in stems)
    question = f"Make a folder {folder} and move all files that end in .{suffix} into it."
    added = {f"{folder}/{name}": before[name] for name in names}
    return _Draft(question, before, f"mkdir {folder} && mv *.{suffix} {folder}", added, names)


def _replace(rng: random.Random, most: int) -> _Draft:
    lines = _words(rng, most)
    before, given, _ = _read(rng, lines)
    old = rng.choice(lines)
    new = rng.choice([word for word in _WORDS if word != old])
    question = f"Replace {old} by {new} everywhere in {given}."
    added = {given: _text([new if line == old else line for line in lines])}
    return _Draft(question, before, f"sed -i s/{old}/{new}/g {given}", added)


def _join(rng: random.Random, most: int) -> _Draft:
    first, second, other, made = (f"{stem}.txt" for stem in rng.sample(_WORDS, 4))
    before = {name: _text(_words(rng, most)) for name in (first, second, other)}
    question = f"Write {first}, followed by {second}, to {made}."
    return _Draft(question, before, f"cat {first} {second} > {made}", {made: before[first] + before[second]})


_DRAWS: dict[Kind, Callable[[random.Random, int], _Draft]] = {
    "count": _count, "column": _column, "sort": _sort, "filter": _filter, "sum": _sum, "first": _first,
    "unique": _unique, "rename": _rename, "delete": _delete, "move": _move, "replace": _replace, "join": _join,
}  # fmt: skip
