"""GSM8K: grade-school word problems with a number as the answer (Cobbe et al., arXiv 2110.14168)."""

from pydantic import Field

from whet.data.jsonl import Row, Tally, read_jsonl, rows_of
from whet.environments.math_grader import as_number
from whet.environments.problems import BoxedProblems, Problem, Split, split_problems
from whet.errors import DataError

HUB = "openai/gsm8k"


class GSM8K(BoxedProblems):
    """Rows of ``question`` and ``answer``; what follows ``####`` in the answer is the number asked for."""

    path: str | None = None
    """A JSONL file; None: the Hugging Face dataset, both splits."""
    test_path: str | None = None
    """A JSONL file; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=500, ge=0)
    """At most so many test problems."""

    def problems(self) -> dict[Split, list[Problem]]:
        train_rows, test_rows = self._rows()
        train = [_problem(row, f"gsm8k/train/{index}") for index, row in enumerate(train_rows)]
        test = [_problem(row, f"gsm8k/test/{index}") for index, row in enumerate(test_rows or [])]
        tally = Tally(f"gsm8k ({self.path or HUB})", len(train) + len(test))
        return split_problems("gsm8k", train, None if test_rows is None else test, self.test_size, tally)

    def _rows(self) -> tuple[list[Row], list[Row] | None]:
        test = read_jsonl(self.test_path) if self.test_path else None
        if self.path:
            return read_jsonl(self.path), test
        return _from_hub("train"), test or _from_hub("test")


def _from_hub(split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return rows_of(load_dataset(HUB, "main", split=split), f"{HUB}/{split}")
    except Exception as error:  # of many kinds: no network, no such data set, a broken cache
        raise DataError(
            f"the data set {HUB} can't be loaded from the Hugging Face Hub ({type(error).__name__}: {error}). "
            "Give a file instead: data.path=train.jsonl, with rows of question and answer"
        ) from error


def _problem(row: Row, uid: str) -> Problem:
    _, mark, number = row.text("answer").rpartition("####")
    if not mark or as_number(number) is None:
        raise row.problem("answer", "must end in '#### ' and a number", row.values["answer"][-40:])
    return Problem(uid, row.text("question"), number.strip())
