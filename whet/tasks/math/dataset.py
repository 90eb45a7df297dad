"""MATH: competition problems with LaTeX answers (Hendrycks et al., arXiv 2103.03874), and files of the same form."""

import contextlib
import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from whet.base.errors import DataError
from whet.base.extras import require
from whet.data.row import Row, Text, read_rows
from whet.data.split import Tally
from whet.tasks.base import Environments
from whet.tasks.math.answers import is_prose
from whet.tasks.math.notation import last_boxed
from whet.tasks.problems import BoxedProblems, Problem
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, split_files


def _rating(value: Any) -> Any:
    """Such words as "hard" have no order."""
    return None if isinstance(value, str | bool) else value


_DAPO = (  # what stands around the questions of DAPO-Math-17k
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


def _one(answer: Any) -> Any:
    """The answer as a text: numbers as they are written, a list of one as what it lists."""
    if isinstance(answer, str) and answer.startswith("["):  # Skywork: a list in JSON
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, list):
        if len(answer) != 1:
            raise ValueError("must be one answer")
        (answer,) = answer
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


def _no_solution(answer: str | None) -> str | None:
    if answer is not None and "####" in answer:
        raise ValueError("is a worked solution as GSM8K has them; read it with data.type=gsm8k")
    return answer if answer is None or (boxed := last_boxed(answer)) is None else boxed


class Question(Row):
    """A row of MATH, with an ``answer`` or a boxed one in its ``solution``; of DAPO or Skywork (``prompt``,
    ``reward_model``); or with an ``expected_answer`` (NeMo Gym, OpenMathInstruct)."""

    problem: Text
    answer: Annotated[str | None, BeforeValidator(_one), AfterValidator(_no_solution)]
    difficulty: Annotated[float | None, BeforeValidator(_rating)] = None

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "answer" in values:
            return values
        found = dict[str, Any]()
        try:
            if "reward_model" in values:
                prompt = values["prompt"]
                asked = prompt if isinstance(prompt, str) else prompt[0]["content"]
                found = {
                    "problem": asked.removeprefix(_DAPO[0]).removesuffix(_DAPO[1]),
                    "answer": _one(values["reward_model"]["ground_truth"]),
                }
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise ValueError("the row is not as DAPO or Skywork write it, with one answer") from None
        if "expected_answer" in values:
            found = {"answer": values["expected_answer"]}
            if "question" in values:
                found["problem"] = values["question"]
        elif not found and isinstance(values.get("solution"), str):
            if (boxed := last_boxed(values["solution"])) is None:
                raise ValueError("field 'answer' is missing, and field 'solution' has no \\boxed{} to take it from")
            found = {"answer": boxed}
        return found | values


class Math(FileTasks, BoxedProblems):
    """Rows of ``problem``, ``answer`` (LaTeX, without the box) and, where known, ``difficulty``, a number."""

    test_size: int = Field(default=500, ge=0, le=MAX_SIZE)
    """The most test problems to use."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None

    def open(self) -> Environments:
        require("tasks", "data.type=math", "math_verify")
        return super().open()

    @model_validator(mode="after")
    def _ordered(self) -> "Math":
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError("min_difficulty must not exceed max_difficulty")
        return self

    def problems(self) -> dict[Split, list[Problem]]:
        return split_files("math", self.path, self.test_path, self.test_size, self._read, Problem.key)

    def _read(self, path: str, split: Split, tally: Tally) -> list[Problem]:
        rows, problems = read_rows(path, Question, self.columns), []
        tally.rows += len(rows)
        for index, row in enumerate(rows):
            if not row.answer or not row.answer.strip():
                tally.drop("without an answer")
            elif is_prose(row.answer):
                tally.drop("whose answer is prose or several formulas, which can't be compared")
            elif not self._difficult_enough(row):
                tally.drop("outside the difficulty range")
            else:
                problems.append(Problem(f"math/{split}/{index}", row.problem, row.answer, difficulty=row.difficulty))
        return problems

    def _difficult_enough(self, row: Question) -> bool:
        low, high = self.min_difficulty, self.max_difficulty
        if low is None and high is None:
            return True
        if row.difficulty is None:
            raise DataError(
                f"{row.where}: field 'difficulty' is missing or not a number, and data asks for a range of it"
            )
        return (low is None or row.difficulty >= low) and (high is None or row.difficulty <= high)
