"""Write GSM8K's example_model_solutions.jsonl as rows to learn from: pairs of a right and a wrong solution of the same
problem, or each solution with a score of 1 or 0. The problems, not the rows, are split into train.jsonl and test.jsonl.

    python examples/gsm8k_pairs.py example_model_solutions.jsonl gsm8k-pairs
"""

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from whet.base.errors import WhetError
from whet.base.seeds import derive_seed
from whet.data.row import Row, Text, read_rows


class Solution(BaseModel):
    """A model's solution, and whether it is right."""

    solution: Text
    is_correct: bool


class Solutions(Row):
    """A row of GSM8K's example_model_solutions.jsonl: a question and four models' solutions of it."""

    question: Text
    finetuned_6b: Solution = Field(alias="6b_finetuning")
    verified_6b: Solution = Field(alias="6b_verification")
    finetuned_175b: Solution = Field(alias="175b_finetuning")
    verified_175b: Solution = Field(alias="175b_verification")

    @property
    def different(self) -> dict[str, bool]:
        """Return whether each different solution is right."""
        given = (self.finetuned_6b, self.verified_6b, self.finetuned_175b, self.verified_175b)
        return {each.solution: each.is_correct for each in given}


def rows_of(prompt: str, solutions: dict[str, bool], form: str) -> list[dict[str, Any]]:
    """Return the rows of a problem; none if no pair can be made."""
    if form == "scored":
        return [{"prompt": prompt, "completion": text, "score": float(right)} for text, right in solutions.items()]
    good = [text for text, right in solutions.items() if right]
    bad = [text for text, right in solutions.items() if not right]
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in product(good, bad)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", help="example_model_solutions.jsonl")
    parser.add_argument("out", type=Path, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--form", choices=["pairs", "scored"], default="pairs")
    arguments = parser.parse_args()
    try:
        problems = [(row.question, row.different) for row in read_rows(arguments.solutions, Solutions)]
    except WhetError as error:
        raise SystemExit(f"error: {error}") from None
    written: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    dropped = Counter[str]()
    for question, solutions in problems:
        rows = rows_of(question, solutions, arguments.form)
        if not rows:
            dropped["all right" if all(solutions.values()) else "all wrong"] += 1
        held_out = derive_seed("gsm8k_pairs", " ".join(question.split())) % 10 == 0
        written["test" if held_out else "train"] += rows
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, rows in written.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (arguments.out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    different = sum(len(solutions) for _, solutions in problems)
    again = 4 * len(problems) - different
    print(f"{different + again} solutions: {different} used, dropped: {again} that another model gave too")
    reasons = ", ".join(f"{count} with solutions that are {reason}" for reason, count in sorted(dropped.items()))
    print(f"{len(problems)} problems: {len(problems) - dropped.total()} used, dropped: {reasons or 'none'}")
    print(f"{len(written['train'])} rows in train.jsonl, {len(written['test'])} in test.jsonl")


if __name__ == "__main__":
    main()
