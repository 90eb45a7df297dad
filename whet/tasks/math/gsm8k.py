"""GSM8K: grade-school word problems with a number as the answer (Cobbe et al., arXiv 2110.14168)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from whet.data.row import Row, Text, read_rows
from whet.data.split import Tally
from whet.tasks.math.written_numbers import as_number
from whet.tasks.problems import BoxedProblems, Problem
from whet.tasks.splits import MAX_SIZE, Split, split_files

HUB = "hf:openai/gsm8k:main:"


def _number(answer: str) -> str:
    _, mark, number = answer.rpartition("####")
    if not mark or as_number(number) is None:
        raise ValueError("must end in '#### ' and a number")
    return number.strip()


class Question(Row):
    """A row of GSM8K."""

    question: Text
    answer: Annotated[Text, AfterValidator(_number)]


class GSM8K(BoxedProblems):
    """Rows of ``question`` and ``answer``. The number after ``####`` in the answer is the gold answer."""

    path: str | None = None
    """A JSONL file; None: the Hugging Face dataset, both splits."""
    test_path: str | None = None
    """A JSONL file; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=500, ge=0, le=MAX_SIZE)
    """The most test problems to use."""

    def problems(self) -> dict[Split, list[Problem]]:
        path, test_path = self.path, self.test_path
        if path is None:
            path, test_path = f"{HUB}train", test_path or f"{HUB}test"
        return split_files("gsm8k", path, test_path, self.test_size, self._read, Problem.key)

    def _read(self, path: str, split: Split, tally: Tally) -> list[Problem]:
        rows = read_rows(path, Question)
        tally.rows += len(rows)
        return [Problem(f"gsm8k/{split}/{index}", row.question, row.answer) for index, row in enumerate(rows)]
