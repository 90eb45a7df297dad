"""Data sets of mathematical problems: MATH (Hendrycks et al., arXiv 2103.03874), competition problems with LaTeX
answers, and files of the same form; and GSM8K (Cobbe et al., arXiv 2110.14168), grade-school word problems with
numbers."""

import contextlib
import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from whet.base.errors import DataError
from whet.base.extras import require
from whet.base.strict_json import JsonObject
from whet.core.content import content_of, text_of
from whet.data.row import Row, Text, read_rows
from whet.data.split import Tally
from whet.tasks.base import Environments
from whet.tasks.math.answers import is_prose
from whet.tasks.math.grader import GoldAnswer
from whet.tasks.math.notation import last_boxed
from whet.tasks.math.written_numbers import as_number
from whet.tasks.problems import BoxedProblems, Problem
from whet.tasks.splits import MAX_SIZE, FileTasks, Split, split_files

GSM8K_HUB = "hf:openai/gsm8k:main:"


def _rating(value: object) -> object:
    """Return the rating; None for words such as "hard", which have no order."""
    return None if isinstance(value, str | bool) else value


_DAPO = (  # the texts before and after each question of DAPO-Math-17k
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


def _answer_text(answer: object) -> object:
    """Return the answer as a text. A list must have one element, the answer; ``[-9, 9]`` in a text is an interval."""
    if isinstance(answer, str) and answer.startswith("["):  # Skywork: a list in JSON
        with contextlib.suppress(ValueError):
            listed = json.loads(answer)
            answer = listed if len(listed) == 1 or any(isinstance(each, str) for each in listed) else answer
    if isinstance(answer, list):
        if len(answer) != 1:
            raise ValueError(f"must be one answer, not a list of {len(answer)}")
        (answer,) = answer
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


def _unboxed(answer: str | None) -> str | None:
    """Return the answer without its box. Raises ``ValueError`` for a worked solution of GSM8K."""
    if answer is not None and "####" in answer:
        raise ValueError("is a worked solution of GSM8K; read the file with data.type=gsm8k")
    return answer if answer is None or (boxed := last_boxed(answer)) is None else boxed


class MathRow(Row):
    """A row of MATH, with an ``answer`` or a boxed one in its ``solution``; of DAPO or Skywork (``prompt``,
    ``reward_model``); or with an ``expected_answer`` (NeMo Gym, OpenMathInstruct)."""

    problem: Text
    answer: Annotated[str | None, BeforeValidator(_answer_text), AfterValidator(_unboxed)]
    difficulty: Annotated[float | None, BeforeValidator(_rating)] = None

    @model_validator(mode="before")
    @classmethod
    def _from_other_columns(cls, values: JsonObject) -> dict[str, object]:
        """Return the row with ``problem`` and ``answer``, read from the columns of published data sets."""
        if "answer" in values:
            return values
        fields = dict[str, Any]()
        try:
            if "reward_model" in values:
                prompt = values["prompt"]
                asked = prompt if isinstance(prompt, str) else text_of(content_of(prompt[0]["content"]))
                fields = {
                    "problem": asked.removeprefix(_DAPO[0]).removesuffix(_DAPO[1]),
                    "answer": _answer_text(values["reward_model"]["ground_truth"]),
                }
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise ValueError(
                "field 'reward_model' must hold one 'ground_truth', and field 'prompt' a text or messages, "
                "as in DAPO-Math-17k and Skywork-OR1"
            ) from None
        if "expected_answer" in values:
            fields = {"answer": values["expected_answer"]}
            if "question" in values:
                fields["problem"] = values["question"]
        elif not fields and isinstance(values.get("solution"), str):
            if (boxed := last_boxed(values["solution"])) is None:
                raise ValueError("field 'answer' is missing, and field 'solution' has no \\boxed{} to take it from")
            fields = {"answer": boxed}
        return fields | values


class Math(FileTasks[GoldAnswer], BoxedProblems):
    """Rows of ``problem``, ``answer`` (LaTeX, without the box) and, optionally, ``difficulty``, a number."""

    test_size: int = Field(default=500, ge=0, le=MAX_SIZE)
    """The most test problems to use."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None

    def open(self) -> Environments[GoldAnswer]:
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
        rows, problems = read_rows(path, MathRow, self.columns), []
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

    def _difficult_enough(self, row: MathRow) -> bool:
        low, high = self.min_difficulty, self.max_difficulty
        if low is None and high is None:
            return True
        if row.difficulty is None:
            raise DataError(
                f"{row.where}: field 'difficulty' is missing or not a number; "
                "data.min_difficulty and data.max_difficulty need one in every row"
            )
        return (low is None or row.difficulty >= low) and (high is None or row.difficulty <= high)


def _final_number(answer: str) -> str:
    """Return the number after the ``####`` of a worked solution."""
    _, mark, number = answer.rpartition("####")
    if not mark or as_number(number) is None:
        raise ValueError("must end in '#### ' and a number")
    return number.strip()


class GSM8KRow(Row):
    """A row of GSM8K."""

    question: Text
    answer: Annotated[Text, AfterValidator(_final_number)]


class GSM8K(BoxedProblems):
    """Rows of ``question`` and ``answer``. The number after ``####`` in the answer is the gold answer."""

    path: str | None = None
    """A JSONL file; None: the Hugging Face dataset, both splits."""
    test_path: str | None = None
    """A JSONL file; None: test_size rows of ``path`` are held out."""
    columns: dict[str, str] = Field(default={})
    """Columns of the file with other names than the fields, as in ``{question: problem}``."""
    test_size: int = Field(default=500, ge=0, le=MAX_SIZE)
    """The most test problems to use."""

    def problems(self) -> dict[Split, list[Problem]]:
        path, test_path = self.path, self.test_path
        if path is None:
            path, test_path = f"{GSM8K_HUB}train", test_path or f"{GSM8K_HUB}test"
        return split_files("gsm8k", path, test_path, self.test_size, self._read, Problem.key)

    def _read(self, path: str, split: Split, tally: Tally) -> list[Problem]:
        rows = read_rows(path, GSM8KRow, self.columns)
        tally.rows += len(rows)
        return [Problem(f"gsm8k/{split}/{index}", row.question, row.answer) for index, row in enumerate(rows)]
