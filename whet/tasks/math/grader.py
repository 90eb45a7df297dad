r"""Grading of mathematical answers: the last ``\boxed{}`` of a reply is compared with the gold answer.

Numbers are compared here, in microseconds. Formulas go to math-verify in a killable worker process, as LaTeX: a reply
is never evaluated as Python.
"""

import re
from dataclasses import dataclass

from pydantic import Field

from whet.base.errors import DataError
from whet.config import Config
from whet.core.types import Task
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environments
from whet.tasks.cases import question_of
from whet.tasks.grading import POOLED, GradingPool
from whet.tasks.math.answers import How, same
from whet.tasks.math.formulas import Unreadable
from whet.tasks.math.notation import last_boxed as last_boxed
from whet.tasks.math.notation import squeezed, tidy
from whet.tasks.math.restated import judge, restates
from whet.tasks.math.written_numbers import equal, is_open_division, read_number, unit_ratio

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_LAST_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?")

_ARGUMENT = re.compile(r"(\\(?:sin|cos|tan|log|ln)) ?\(([0-9A-Za-z]+)\)(?![0-9A-Za-z({\\^_])")


class _NeedsWorker(Exception):
    """The comparison involves a formula, which only a worker process may parse."""


class MathGrader(Config):
    """Settings of the grader of mathematical answers."""

    require_box: bool = True
    """Off: the last number of a reply without a box counts, which rewards listing guesses."""
    max_chars: int = Field(default=1000, ge=1)
    """Longest boxed answer that is graded, in characters."""
    limits: WorkerLimits = WorkerLimits()

    def open(self) -> "MathGrading":
        return MathGrading(self)

    def extract(self, answer: str) -> str | None:
        """Return the part of a reply that is graded; None if it is missing, empty or too long."""
        given = last_boxed(answer)
        if given is None and not self.require_box:
            numbers = _LAST_NUMBER.findall(answer[-self.max_chars :])
            given = numbers[-1] if numbers else None
        return given if given is not None and given.strip() and len(given) <= self.max_chars else None


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """The data of a task with a mathematical answer."""

    answer: str
    difficulty: float | None = None  # as the data set rates it


class MathGrading(Environments[GoldAnswer]):
    """An opened grader. Its worker processes start with the first answer that needs them."""

    named_scores = POOLED

    def __init__(self, grader: MathGrader) -> None:
        self.grader = grader
        self.pool = GradingPool(prepare, grader.limits)

    async def grade(self, task: Task[GoldAnswer], answer: str) -> dict[str, float]:
        """Return ``compare`` with the task's gold answer."""
        return await self.compare(answer, task.data.answer, question_of(task))

    async def compare(self, answer: str, gold: str, question: str = "") -> dict[str, float]:
        """Return ``reward`` and ``correct`` (0 or 1), ``format`` (1 if there is an answer to compare) and, if the
        answer broke the worker, ``grading_timeout`` or ``grading_crash``. With ``question``, an answer that only
        repeats the question's own formula is wrong. Raises ``DataError`` for a gold answer that math-verify can't
        read."""
        given = self.grader.extract(answer)
        if given is None:
            return _scores(correct=False, extracted=False)
        try:
            right = same(given, gold, _needs_worker)
            if not right or (read_number(tidy(given)) and read_number(tidy(gold))):
                return _scores(correct=right and not restates(given, gold, question))
        except _NeedsWorker:
            pass
        scores = await self.pool.scores(grade_in_worker, given, gold, question)
        if "bad_gold" in scores:
            raise DataError(f"the gold answer {gold!r} can't be parsed as mathematics; correct or drop its row")
        return scores

    async def close(self) -> None:
        self.pool.close()


def compare_numbers(given: str, gold: str) -> bool | None:
    """Return whether two written numbers are equal (see ``written_numbers.equal``); None if either isn't a number.

    >>> compare_numbers("$1,234.50", "2469/2"), compare_numbers("50%", "50"), compare_numbers("x", "2")
    (True, True, None)
    >>> compare_numbers("40 - 86", "-46"), compare_numbers("52_{82}", "52_8")
    (None, False)
    """
    left, right = read_number(tidy(given)), read_number(tidy(gold))
    return None if left is None or right is None else equal(left, right)


def canonical(given: str, gold: str = "") -> str:
    """Return a text that is equal for answers that are written differently but are the same number or text. A number
    without a unit has the gold answer's; a division that is left to compute is returned as it is written.

    >>> canonical("1,000.0") == canonical("1000"), canonical("x + 1") == canonical("x+1")
    (True, True)
    >>> canonical("10 m", "2 km") == canonical("10", "2 km"), canonical("10 m", "2 km") == canonical("0.01", "2 km")
    (False, True)
    >>> canonical("84/2", "42"), canonical("6/8", "1/2")
    ('84/2', '3/4')
    """
    tidied = tidy(given)
    number, gold_number = read_number(tidied), read_number(tidy(gold))
    if number is None or (gold_number and is_open_division(number, gold_number)):
        return squeezed(_ARGUMENT.sub(r"\1 \2", tidied))
    if number.base is not None:
        digits, base = number.base
        return f"{digits} in base {base}"
    ratio = unit_ratio(number.unit, gold_number.unit if gold_number else "")
    value = f"{number.value} {number.unit}" if ratio is None else str(number.value * ratio)
    return f"{value}{'%' * number.percent}"


def prepare() -> None:
    """Import math-verify and warm up its parser, in a new worker process."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade_in_worker("x^2", "\\frac{x}{3}")


def grade_in_worker(given: str, gold: str, question: str = "") -> dict[str, float]:
    """Return the scores that math-verify gives. Its own time-outs, which rely on signals, are off."""
    try:
        return _scores(correct=judge(given, gold, question))
    except Unreadable:
        return {"bad_gold": 1.0}


def _needs_worker(given: str, gold: str, how: How) -> bool:
    raise _NeedsWorker


def _scores(correct: bool, extracted: bool = True) -> dict[str, float]:
    return {"reward": float(correct), "correct": float(correct), "format": float(extracted)}
