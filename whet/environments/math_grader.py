r"""Grading of mathematical answers: the last ``\boxed{}`` of a reply against a known answer.

Plain numbers and fractions are compared exactly, here, in microseconds. Everything else goes to math-verify in a
killable worker process, as LaTeX only: neither here nor there is a reply ever evaluated as Python. Knows no task.
"""

import re
from fractions import Fraction

from pydantic import Field

from whet.config import Config
from whet.environments.base import Environments
from whet.environments.grading import GradingPool
from whet.errors import DataError
from whet.processes.pool import WorkerLimits
from whet.types import Task

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(rf"([+-]?)\s*({_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"([+-]?)\s*(?:([0-9]+)\s*/\s*([0-9]+)|\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\})")
_SHORT_FRACTION = re.compile(r"(?<=frac)([0-9])([0-9])$")  # \frac12
_IN_BASE = re.compile(r"([+-]?)[({]?0*([0-9][0-9A-Za-z]*)[)}]?_(?:\{\s*([0-9]+)\s*\}|([0-9]))")  # 2A_{16}
_LAST_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?")
_NUMBER_LENGTH = 100  # characters; longer ones are left to the worker, where a runaway computation is contained
_NOISE = re.compile(r"\\?[$%]|\\[!,;: ]")  # currency, percent, maths mode and thin spaces


class MathGrader(Config):
    """Grades whether an answer equals the known one, mathematically."""

    require_box: bool = True
    """Off: without a box the last number of the text counts, which rewards guessing aloud."""
    max_chars: int = Field(default=1000, ge=1)
    """Longest boxed answer that counts."""
    limits: WorkerLimits = WorkerLimits()

    def open(self) -> "MathGrading":
        return MathGrading(self)

    def extract(self, answer: str) -> str | None:
        """The text that is graded: not empty and of bounded length; None where there is none."""
        found = last_boxed(answer)
        if found is None and not self.require_box:
            numbers = _LAST_NUMBER.findall(answer[-self.max_chars :])
            found = numbers[-1] if numbers else None
        return found if found is not None and found.strip() and len(found) <= self.max_chars else None


class MathGrading(Environments):
    """A grader at work. Worker processes start with the first answer that needs them."""

    def __init__(self, grader: MathGrader) -> None:
        self.grader = grader
        self.pool = GradingPool(prepare, grader.limits)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        """``compare`` with the task's known answer."""
        return await self.compare(answer, task.data["answer"])

    async def compare(self, answer: str, gold: str) -> dict[str, float]:
        """``reward`` and ``correct`` (0 or 1), ``format`` (1 if there is an answer to compare), and where a hostile
        answer broke the worker ``grading_timeout`` or ``grading_crash``.

        Raises ``DataError`` when the known answer itself means nothing to math-verify.
        """
        given = self.grader.extract(answer)
        if given is None:
            return _scores(correct=False, extracted=False)
        right = compare_numbers(given, gold)
        if right is not None or given.strip() == gold.strip():
            return _scores(correct=right is not False)
        scores = await self.pool.scores(grade_in_worker, given, gold)
        if "bad_gold" in scores:
            raise DataError(f"the known answer {gold!r} can't be parsed as mathematics; correct or drop its row")
        return scores

    async def close(self) -> None:
        self.pool.close()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}``; None if there is none or it isn't closed.

    >>> last_boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is a brace of the answer
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


def compare_numbers(given: str, gold: str) -> bool | None:
    """Return whether two plain numbers are equal, exactly; of two that are written in a base, whether digits and base
    are. None if either is neither, if only one names its base, or if only one is a percentage and their digits differ.

    >>> compare_numbers("$1,234.50", "2469/2"), compare_numbers("50%", "50"), compare_numbers("x", "2")
    (True, True, None)
    >>> compare_numbers("52_{8}", "52_8"), compare_numbers("52_{82}", "52_8")
    (True, False)
    """
    based = [_IN_BASE.fullmatch(_NOISE.sub("", text).strip()) for text in (given, gold)]
    if based[0] and based[1]:  # math-verify drops the base
        return _in_base(based[0]) == _in_base(based[1])
    left, right = as_number(given), as_number(gold)
    if left is None or right is None:
        return None
    if left != right and ("%" in given) != ("%" in gold):
        return None
    return left == right


def _in_base(match: re.Match[str]) -> tuple[bool, str, int]:
    sign, digits, braced, bare = match.groups()
    return sign == "-", digits.upper(), int(braced or bare)


def as_number(text: str) -> Fraction | None:
    """Return the value of a plain integer, decimal or fraction of two integers; a percent sign is ignored. None for
    anything else, also for overlong numbers and for digits other than 0-9."""
    if len(text) > _NUMBER_LENGTH:
        return None
    plain = _NOISE.sub("", text).replace("{,}", ",").strip().removesuffix(".")
    plain = _SHORT_FRACTION.sub(r"{\1}{\2}", plain)
    if match := _NUMBER.fullmatch(plain):
        value = Fraction(match[2].replace(",", "").rstrip("."))
    elif match := _FRACTION.fullmatch(plain):
        numerator, denominator = match[2] or match[4], match[3] or match[5]
        if not int(denominator):
            return None
        value = Fraction(int(numerator), int(denominator))
    else:
        return None
    return -value if match[1] == "-" else value


def prepare() -> None:
    """Import math-verify and warm its parser, in a new worker."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade_in_worker("x^2", "\\frac{1}{3}")


def grade_in_worker(given: str, gold: str) -> dict[str, float]:
    """Compare with math-verify (github.com/huggingface/Math-Verify). Its own time-outs rely on signals and are off."""
    from math_verify import LatexExtractionConfig, parse, verify

    how = [LatexExtractionConfig(boxed_match_priority=0)]
    known = parse(f"\\boxed{{{gold}}}", how, parsing_timeout=None)
    if not known:
        return {"bad_gold": 1.0}
    answer = parse(f"\\boxed{{{given}}}", how, parsing_timeout=None)
    return _scores(correct=bool(answer) and verify(known, answer, timeout_seconds=None))


def _scores(correct: bool, extracted: bool = True) -> dict[str, float]:
    return {"reward": float(correct), "correct": float(correct), "format": float(extracted)}
