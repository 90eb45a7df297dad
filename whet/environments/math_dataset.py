"""MATH: competition problems with LaTeX answers (Hendrycks et al., arXiv 2103.03874), and files of the same form."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from whet.data.row import Row, Text, read_rows
from whet.data.split import Tally
from whet.environments.problems import BoxedProblems, Problem, Split, separate
from whet.errors import DataError


def _rating(value: Any) -> Any:
    """Such words as "hard" have no order."""
    return None if isinstance(value, str | bool) else value


_DAPO = (  # what stands around the questions of DAPO-Math-17k
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


class Question(Row):
    """A row of MATH, of DAPO or Skywork (``prompt``, ``reward_model``), or of NeMo Gym (``expected_answer``)."""

    problem: Text
    answer: str | None  # the published file has rows without one
    difficulty: Annotated[float | None, BeforeValidator(_rating)] = None

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: dict[str, Any]) -> dict[str, Any]:
        try:
            if "reward_model" in values:
                asked, answer = values["prompt"][0]["content"], values["reward_model"]["ground_truth"]
                if answer.startswith("["):  # Skywork: a list in JSON
                    (answer,) = json.loads(answer)
                values = {"problem": asked.removeprefix(_DAPO[0]).removesuffix(_DAPO[1]), "answer": answer, **values}
            elif "expected_answer" in values:
                values = {"problem": values["question"], "answer": str(values["expected_answer"]), **values}
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise ValueError("the row is not as DAPO, Skywork or NeMo Gym write it, with one answer") from None
        return values


class Math(BoxedProblems):
    """Rows of ``problem``, ``answer`` (LaTeX, without the box) and, where known, ``difficulty``, a number."""

    path: str
    """A JSONL file, or ``hf:name:config:split`` on the Hugging Face Hub."""
    test_path: str | None = None
    """The same; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=500, ge=0)
    """At most so many test problems."""
    columns: dict[str, str] = Field(default={})
    """What the fields are called there, where they have other names: ``{problem: question}``."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "Math":
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError("min_difficulty must not exceed max_difficulty")
        return self

    def problems(self) -> dict[Split, list[Problem]]:
        train_rows = read_rows(self.path, Question, self.columns)
        test_rows = read_rows(self.test_path, Question, self.columns) if self.test_path else None
        tally = Tally(f"math ({self.path})", len(train_rows) + len(test_rows or []))
        train = self._problems(train_rows, "train", tally)
        test = None if test_rows is None else self._problems(test_rows, "test", tally)
        return separate("math", train, test, self.test_size, Problem.key, tally)

    def _problems(self, rows: list[Question], split: Split, tally: Tally) -> list[Problem]:
        problems = []
        for index, row in enumerate(rows):
            if not row.answer or not row.answer.strip():
                tally.drop("without an answer")
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
