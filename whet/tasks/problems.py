"""Questions with known mathematical answers, as a task set: the common part of GSM8K, MATH and arithmetic.

Also the guarantee that all task sets here give: the test questions are not among the training questions, and no
question is there twice. Knows no file format.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, cast, get_args

from pydantic import Field, field_validator

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.config import Config
from whet.core.types import Message, Task
from whet.data.split import Tally, distinct, hold_out
from whet.tasks.base import Environments, TaskSet
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.math.grader import MathGrader, compare_numbers

BOXED = "Reason step by step and put the final answer in \\boxed{}."
Split = Literal["train", "test"]
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Problem:
    """A question and what it is graded by."""

    uid: str
    question: str
    answer: str
    difficulty: float | None = None  # as the data set rates it

    def key(self) -> int:
        """Return a number that is the same for two problems that ask the same."""
        return question_key(self.question)


class Example(Config):
    """A question with the reply that the model is shown for it."""

    question: str
    answer: str


class BoxedProblems(TaskSet, ABC):
    """Base of task sets whose replies are graded by ``MathGrader``. Subclasses define ``problems``."""

    prompt: str = "{question}\n\n" + BOXED
    """What the user says."""
    system: str | None = None
    examples: tuple[Example, ...] = ()
    """Problems solved before the question, as earlier turns of the conversation."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many training tasks, the first ones."""
    grader: MathGrader = MathGrader()

    @field_validator("prompt")
    @classmethod
    def _has_question(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("must contain {question}, which the question replaces")
        return prompt

    @abstractmethod
    def problems(self) -> dict[Split, list[Problem]]:
        """Both splits, without overlap."""

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks[known_split(split)]

    def open(self) -> Environments:
        """By default a ``MathGrading``; a subclass with its own ``grade`` or ``make`` stands for itself."""
        return self if self.own_episodes else self.grader.open()

    def gold(self, task: Task) -> str:
        return f"\\boxed{{{task.data['answer']}}}"

    def cases(self) -> Sequence[Case]:
        """Answers to the first task, whatever it asks."""
        tasks = self._tasks["train"]
        task = tasks[0]
        gold, box = task.data["answer"], self.gold(task)
        wrong = f"\\boxed{{{gold} + 1}}"
        answers: list[tuple[Kind, str, str, float]] = [
            ("good", "boxed", box, 1.0),
            ("good", "boxed after reasoning", f"First I thought it was 7. So the answer is ${box}$.", 1.0),
            ("good", "the last of two boxes is right", f"{wrong} no, {box}", 1.0),
            ("bad", "another answer", wrong, 0.0),
            ("bad", "the last of two boxes is wrong", f"{box} no, {wrong}", 0.0),
            ("boundary", "nothing", "", 0.0),
            ("boundary", "an empty box", "\\boxed{}", 0.0),
            ("boundary", "a box that is not closed", f"\\boxed{{{gold}", 0.0),
            ("adversarial", "several answers in one box", f"\\boxed{{{gold}, {gold} + 1, {gold} + 2}}", 0.0),
            ("adversarial", "code", "\\boxed{__import__('os')._exit(0)}", 0.0),
            ("adversarial", "an endless tower", f"\\boxed{{{'9^{' * 200}9{'}' * 200}}}", 0.0),
        ]
        if self.grader.require_box:
            answers.append(("boundary", "without a box", f"The answer is {gold}.", 0.0))
        own = [Case(name, task, answer, expected, kind) for kind, name, answer, expected in answers]
        others = [self.gold(other) for other in tasks[1:4] if compare_numbers(other.data["answer"], gold) is False]
        return [*own, *unearned(task, box, others, form=lambda text: f"\\boxed{{{text}}}")]

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        problems = self.problems()
        chosen = {"train": problems["train"][: self.limit], "test": problems["test"]}
        return {split: [self._task(problem) for problem in chosen[split]] for split in problems}

    def _messages(self, question: str) -> list[Message]:
        shown = [Example(question=self._asked(one.question), answer=one.answer) for one in self.examples]
        return messages(self.system, self._asked(question), shown)

    def _asked(self, question: str) -> str:
        return self.prompt.replace("{question}", question)

    def _task(self, problem: Problem) -> Task:
        rated = {} if problem.difficulty is None else {"difficulty": problem.difficulty}
        return Task(uid=problem.uid, prompt=self._messages(problem.question), data={"answer": problem.answer, **rated})


def messages(system: str | None, user: str, examples: Sequence[Example] = ()) -> list[Message]:
    """A prompt: a system message, if there is one, examples as earlier turns, and what the user says."""
    conversation: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for example in examples:
        conversation.append({"role": "user", "content": example.question})
        conversation.append({"role": "assistant", "content": example.answer})
    return [*conversation, {"role": "user", "content": user}]


def known_split(split: str) -> Split:
    """Return the split, or ``DataError``."""
    if split not in get_args(Split):
        raise DataError(f"there is no split {split!r}; known: {', '.join(get_args(Split))}")
    return cast(Split, split)


def separate(
    name: str, train: list[T], test: list[T] | None, test_size: int, key: Callable[[T], int], tally: Tally
) -> dict[Split, list[T]]:
    """Distinct tasks in two splits that share no key. ``test`` None: ``test_size`` of ``train`` are held out; otherwise
    ``test_size`` bounds ``test``. ``tally`` counts both files' rows."""
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
        raise DataError(f"{name}: no training problem is left")
    return {"train": train, "test": test}


def draw_distinct(
    name: str, draw: Callable[[int], T], size: int, key: Callable[[T], int], apart_from: list[T], more: str
) -> list[T]:
    """Return ``size`` tasks with keys of their own. ``draw`` is given the index of the draw. Raises ``ConfigError``,
    which says what allows for ``more``, when too few of them differ."""
    taken = {key(task) for task in apart_from}
    found = list[T]()
    most = 4 * size + 100
    for index in range(most):
        if len(found) == size:
            break
        task = draw(index)
        if (own := key(task)) not in taken:
            taken.add(own)
            found.append(task)
    if len(found) < size:
        group, _, of = name.partition("/")
        raise ConfigError(
            f"{group}: only {len(found)} different {of} problems in {most} drawn, {size} wanted; "
            f"ask for fewer, or allow more {more}"
        )
    return found


def question_key(question: str) -> int:
    """Return a number that is the same for two questions that differ in letter case and spacing alone."""
    return derive_seed("held out", " ".join(question.split()).casefold())
