"""The tasks of another task set, graded by a judge: by a rubric, or by whether the answer says what the gold answer
says. The rubric's grade becomes a reward from 0 to 1."""

import re
from typing import Literal

from pydantic import model_validator

from whet.base.errors import ConfigError, DataError
from whet.core.types import Task
from whet.tasks.base import Environments
from whet.tasks.judges.judge import AnswerRefusedError, Judge, JudgeEnvironments
from whet.tasks.judges.prompts import EQUAL, RUBRIC, asked, conversation, mark
from whet.tasks.single_turn import graded
from whet.tasks.wrapped import WrappedTaskSet

_MARKS = r"[\s*_`\"'()\[\]<>]*"  # of Markdown and the like; never a sign or a point, which belong to the number
_GRADE = re.compile(
    rf"^[^\w\n]*Grade:{_MARKS}([-+−]?\d+(?:\.\d+)?)(?:\.?{_MARKS}|{_MARKS}\.)$", re.MULTILINE | re.IGNORECASE
)
_EQUAL = re.compile(r"\[\[A(!?)=B\]\]")


_EPISODES = "{} has episodes of several turns or with tools, of which a judge would see one answer"


class Judged(WrappedTaskSet):
    """Tasks of ``taskset``, graded by ``judge``."""

    judge: Judge
    """Who grades."""
    by: Literal["rubric", "reference"] = "rubric"
    """``reference``: right is what says the same as the gold answer, in both orders."""
    rubric: str = "Is it correct, complete and clear?"
    """What a good answer is."""
    low: int = 1
    """The worst grade."""
    high: int = 5
    """The best grade."""
    only_if_wrong: bool = False
    """Ask only where the task set's own grader says that an answer is wrong (answers it can't read, say)."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Judged":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if type(self.taskset).make is not Environments.make:
            raise ValueError(_EPISODES.format(type(self.taskset).__name__))
        if self.only_if_wrong and not self.taskset.grades:
            raise ValueError(f"only_if_wrong asks {type(self.taskset).__name__} first, which grades nothing")
        return self

    def open(self) -> "JudgedEnvironments":
        return JudgedEnvironments(self)


class JudgedEnvironments(JudgeEnvironments):
    """Grades answers by asking the judge."""

    def __init__(self, tasks: Judged) -> None:
        """Raises ``ConfigError`` for a task set whose episodes are its own: a judge grades single answers."""
        super().__init__(tasks.taskset, tasks.judge)
        self.tasks = tasks
        if type(self.inner).make is not Environments.make:
            raise ConfigError(f"data.taskset: {_EPISODES.format(type(tasks.taskset).__name__)}")

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        own = await graded(self.inner, task, answer) if self.tasks.only_if_wrong else {}
        if own.get("reward", 0.0) > 0:
            return own | {"judged": 0.0}
        if not answer.strip():
            return own | {"reward": 0.0, "correct": 0.0, "judged": 0.0}
        try:
            value = await (self._equal(task, answer) if self.tasks.by == "reference" else self._rubric(task, answer))
        except AnswerRefusedError:
            return own | {"reward": 0.0, "correct": 0.0, "judged": 1.0, "judge_refused": 1.0}
        return own | {"reward": value, "correct": float(value >= 1.0), "judged": 1.0}

    async def _rubric(self, task: Task, answer: str) -> float:
        tasks, question, gold = self.tasks, conversation(task.prompt), self.tasks.gold(task)
        reference = f"\nA right answer is: {gold}\n" if isinstance(gold, str) else ""
        text = RUBRIC.format(
            rubric=tasks.rubric, reference=reference, mark=mark(question, answer), question=question, answer=answer,
            low=tasks.low, high=tasks.high,
        )  # fmt: skip

        def read(said: str) -> float | None:
            found = _GRADE.findall(said)
            grade = float(found[-1].replace("−", "-")) if found else None
            return grade if grade is not None and tasks.low <= grade <= tasks.high else None

        grade = await self.client.ask(asked(text), read, task.uid)
        return (grade - tasks.low) / (tasks.high - tasks.low)

    async def _equal(self, task: Task, answer: str) -> float:
        gold = self.tasks.gold(task)
        if not isinstance(gold, str):
            raise DataError(f"task {task.uid!r} has no gold answer to compare with; choose by=rubric")
        question = conversation(task.prompt)
        for first, second in ((answer, gold), (gold, answer)):
            key = mark(question, first, second)
            text = EQUAL.format(mark=key, question=question, first=first, second=second)
            if not await self.client.ask(asked(text), _same, f"{task.uid} {key}"):
                return 0.0
        return 1.0


def _same(said: str) -> bool | None:
    found = _EQUAL.findall(said)
    return found[-1] == "" if found else None
