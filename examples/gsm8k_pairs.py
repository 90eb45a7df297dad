"""GSM8K's example_model_solutions.jsonl as rows to learn from: right solutions above wrong ones of the same problem, or
each solution with a score of 1 or 0. The problems, not the rows, are split into train.jsonl and test.jsonl.

    python examples/gsm8k_pairs.py example_model_solutions.jsonl gsm8k-pairs
"""

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from whet.data.jsonl import Row, read_jsonl
from whet.errors import WhetError
from whet.seeds import derive_seed

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def solutions_of(row: Row) -> dict[str, bool]:
    """The different solutions of a problem, and whether each is right."""
    found = {}
    for model in MODELS:
        given = row.values.get(model)
        if not isinstance(given, dict) or not isinstance(given.get("is_correct"), bool):
            raise row.problem(model, "must hold a solution and is_correct", given)
        found[Row(f"{row.where} ({model})", given).text("solution")] = given["is_correct"]
    return found


def rows_of(prompt: str, found: dict[str, bool], form: str) -> list[dict[str, Any]]:
    """The rows that a problem becomes; none where a pair can't be made."""
    if form == "scored":
        return [{"prompt": prompt, "completion": text, "score": float(right)} for text, right in found.items()]
    good = [text for text, right in found.items() if right]
    bad = [text for text, right in found.items() if not right]
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in product(good, bad)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", type=Path, help="example_model_solutions.jsonl")
    parser.add_argument("out", type=Path, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--form", choices=["pairs", "scored"], default="pairs")
    arguments = parser.parse_args()
    try:
        problems = [(row.text("question"), solutions_of(row)) for row in read_jsonl(arguments.solutions)]
    except WhetError as error:
        raise SystemExit(f"error: {error}") from None
    written: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    dropped = Counter[str]()
    for question, found in problems:
        rows = rows_of(question, found, arguments.form)
        if not rows:
            dropped["all right" if all(found.values()) else "all wrong"] += 1
        held_out = derive_seed("gsm8k_pairs", " ".join(question.split())) % 10 == 0
        written["test" if held_out else "train"] += rows
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, rows in written.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (arguments.out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    different = sum(len(found) for _, found in problems)
    again = len(MODELS) * len(problems) - different
    print(f"{different + again} solutions: {different} used, dropped: {again} that another model gave too")
    reasons = ", ".join(f"{count} with solutions that are {reason}" for reason, count in sorted(dropped.items()))
    print(f"{len(problems)} problems: {len(problems) - dropped.total()} used, dropped: {reasons or 'none'}")
    print(f"{len(written['train'])} rows in train.jsonl, {len(written['test'])} in test.jsonl")


if __name__ == "__main__":
    main()
