"""The tasks of another task set, graded by a judge: by a rubric, whose grade is scaled to a reward from 0 to 1, or by
equivalence to the gold answer."""

import re
from typing import Literal

from pydantic import model_validator

from whet.base.errors import ConfigError, DataError
from whet.core.types import Task
from whet.tasks.base import Environments
from whet.tasks.episodes import graded
from whet.tasks.judges.judge import AnswerRefusedError, Judge, JudgeEnvironments
from whet.tasks.judges.prompts import EQUAL, RUBRIC, asked, conversation, mark
from whet.tasks.wrapped import WrappedTaskSet

_MARKS = r"[\s*_`\"'()\[\]<>]*"  # Markdown and brackets; not a sign or a point, which belong to the number
_GRADE = re.compile(
    rf"^[^\w\n]*Grade:{_MARKS}([-+−]?\d+(?:\.\d+)?)(?:\.?{_MARKS}|{_MARKS}\.)$", re.MULTILINE | re.IGNORECASE
)
_EQUAL = re.compile(r"\[\[A(!?)=B\]\]")
_EPISODES = "{} has episodes of several turns or with tools, but a judge only grades single answers"


class Judged(WrappedTaskSet):
    """Tasks of ``taskset``, graded by ``judge``."""

    judge: Judge
    """The judge that grades."""
    by: Literal["rubric", "reference"] = "rubric"
    """The criterion. ``reference``: the judge must find the answer equivalent to the gold answer, in both orders."""
    rubric: str = "Is it correct, complete and clear?"
    """The description of a good answer."""
    low: int = 1
    """The worst grade."""
    high: int = 5
    """The best grade."""
    only_if_wrong: bool = False
    """Ask the judge only about answers that the task set's own grader calls wrong, for example for their format."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Judged":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if type(self.taskset).make is not Environments.make:
            raise ValueError(_EPISODES.format(type(self.taskset).__name__))
        if self.only_if_wrong and not self.taskset.grades:
            name = type(self.taskset).__name__
            raise ValueError(f"only_if_wrong needs a task set that grades answers, which {name} does not")
        return self

    def open(self) -> "JudgedEnvironments":
        return JudgedEnvironments(self)


class JudgedEnvironments(JudgeEnvironments):
    """Grades answers by asking the judge."""

    def __init__(self, tasks: Judged) -> None:
        """Raise ``ConfigError`` for a task set that makes its own episodes, because a judge grades single answers."""
        super().__init__(tasks.taskset, tasks.judge)
        self.tasks = tasks
        if type(self.inner).make is not Environments.make:
            raise ConfigError(f"data.taskset: {_EPISODES.format(type(tasks.taskset).__name__)}")

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        scores = await graded(self.inner, task, answer) if self.tasks.only_if_wrong else {}
        if scores.get("reward", 0.0) > 0:
            return scores | {"judged": 0.0}
        if not answer.strip():
            return scores | {"reward": 0.0, "correct": 0.0, "judged": 0.0}
        try:
            value = await (self._equal(task, answer) if self.tasks.by == "reference" else self._rubric(task, answer))
        except AnswerRefusedError:
            return scores | {"reward": 0.0, "correct": 0.0, "judged": 1.0, "judge_refused": 1.0}
        return scores | {"reward": value, "correct": float(value >= 1.0), "judged": 1.0}

    async def _rubric(self, task: Task, answer: str) -> float:
        tasks, question, gold = self.tasks, conversation(task.prompt), self.tasks.gold(task)
        reference = f"\nA right answer is: {gold}\n" if isinstance(gold, str) else ""
        text = RUBRIC.format(
            rubric=tasks.rubric, reference=reference, mark=mark(question, answer), question=question, answer=answer,
            low=tasks.low, high=tasks.high,
        )  # fmt: skip

        def read(reply: str) -> float | None:
            grades = _GRADE.findall(reply)
            grade = float(grades[-1].replace("−", "-")) if grades else None
            return grade if grade is not None and tasks.low <= grade <= tasks.high else None

        grade = await self.client.ask(asked(text), read, task.uid)
        return (grade - tasks.low) / (tasks.high - tasks.low)

    async def _equal(self, task: Task, answer: str) -> float:
        gold = self.tasks.gold(task)
        if not isinstance(gold, str):
            raise DataError(f"task {task.uid!r} has no gold answer to compare with; set data.by=rubric")
        question = conversation(task.prompt)
        for first, second in ((answer, gold), (gold, answer)):
            key = mark(question, first, second)
            text = EQUAL.format(mark=key, question=question, first=first, second=second)
            if not await self.client.ask(asked(text), _same, f"{task.uid} {key}"):
                return 0.0
        return 1.0


def _same(reply: str) -> bool | None:
    verdicts = _EQUAL.findall(reply)
    return verdicts[-1] == "" if verdicts else None
