"""GSM8K: grade-school word problems with a number as the answer (Cobbe et al., arXiv 2110.14168)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from whet.data.row import Row, Text, read_rows
from whet.data.split import Tally
from whet.tasks.math.written_numbers import as_number
from whet.tasks.problems import BoxedProblems, Problem, Split, separate

HUB = "hf:openai/gsm8k:main:"


def _number(answer: str) -> str:
    _, mark, number = answer.rpartition("####")
    if not mark or as_number(number) is None:
        raise ValueError("must end in '#### ' and a number")
    return number.strip()


class Question(Row):
    """A row of GSM8K. What follows ``####`` in the answer is the number asked for."""

    question: Text
    answer: Annotated[Text, AfterValidator(_number)]


class GSM8K(BoxedProblems):
    """Rows of ``question`` and ``answer``; what follows ``####`` in the answer is the number asked for."""

    path: str | None = None
    """A JSONL file; None: the Hugging Face dataset, both splits."""
    test_path: str | None = None
    """A JSONL file; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=500, ge=0)
    """At most so many test problems."""

    def problems(self) -> dict[Split, list[Problem]]:
        test_path = self.test_path if self.path else self.test_path or f"{HUB}test"
        train = self._read(self.path or f"{HUB}train", "train")
        test = self._read(test_path, "test") if test_path else None
        tally = Tally(f"gsm8k ({self.path or HUB})", len(train) + len(test or []))
        return separate("gsm8k", train, test, self.test_size, Problem.key, tally)

    def _read(self, path: str, split: Split) -> list[Problem]:
        rows = read_rows(path, Question)
        return [Problem(f"gsm8k/{split}/{index}", row.question, row.answer) for index, row in enumerate(rows)]
