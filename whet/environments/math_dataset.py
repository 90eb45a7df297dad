"""MATH: competition problems with LaTeX answers (Hendrycks et al., arXiv 2103.03874), and files of the same form."""

from pydantic import Field, model_validator

from whet.data.jsonl import Row, Tally, read_jsonl
from whet.environments.problems import BoxedProblems, Problem, Split, split_problems


class Math(BoxedProblems):
    """Rows of ``problem``, ``answer`` (LaTeX, without the box) and, where known, ``difficulty``, a number."""

    path: str
    """A JSONL file."""
    test_path: str | None = None
    """A JSONL file; None: test_size rows of ``path`` are held out."""
    test_size: int = Field(default=500, ge=0)
    """At most so many test problems."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "Math":
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError("min_difficulty must not exceed max_difficulty")
        return self

    def problems(self) -> dict[Split, list[Problem]]:
        train_rows = read_jsonl(self.path)
        test_rows = read_jsonl(self.test_path) if self.test_path else None
        tally = Tally(f"math ({self.path})", len(train_rows) + len(test_rows or []))
        train = self._problems(train_rows, "train", tally)
        test = None if test_rows is None else self._problems(test_rows, "test", tally)
        return split_problems("math", train, test, self.test_size, tally)

    def _problems(self, rows: list[Row], split: Split, tally: Tally) -> list[Problem]:
        problems = []
        for index, row in enumerate(rows):
            if row.values.get("answer", "missing") in (None, ""):
                tally.drop("without an answer")  # the published file has such rows
            elif not self._difficult_enough(row):
                tally.drop("outside the difficulty range")
            else:
                uid, rated = f"math/{split}/{index}", row.values.get("difficulty")
                # Such words as "hard" have no order.
                rating = float(rated) if isinstance(rated, int | float) and not isinstance(rated, bool) else None
                problems.append(Problem(uid, row.text("problem"), row.text("answer"), difficulty=rating))
        return problems

    def _difficult_enough(self, row: Row) -> bool:
        low, high = self.min_difficulty, self.max_difficulty
        if low is None and high is None:
            return True
        value = row.number("difficulty")
        return (low is None or value >= low) and (high is None or value <= high)
