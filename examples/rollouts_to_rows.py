"""What a run's model answered, and how it was graded, as rows to learn from: a right answer above a wrong one to the
same task, right answers alone, or every answer with a score of 1 or 0.

    whet train quickstart optimizer.lr=0 --folder runs/sample        # a learning rate of 0 only samples
    python examples/rollouts_to_rows.py runs/sample pairs.jsonl
"""

import argparse
import json
import random
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from whet.errors import DataError, WhetError
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.seeds import derive_seed

Answers = dict[str, RolloutRecord]  # by text: the different answers to one task


def read_answers(run: Path, dropped: Counter[str]) -> tuple[int, dict[str, Answers]]:
    """(answers read, those kept by task). Each dropped one is counted under its reason."""
    read, tasks = 0, dict[str, Answers]()
    for step in rollout_steps(run):
        for record in read_rollouts(run, step):
            read += 1
            text = record.messages[-1]["content"].strip() if record.messages else ""
            if record.correct is None:
                dropped["failed"] += 1
            elif not text:
                dropped["empty"] += 1
            elif text in tasks.setdefault(record.task, {}):
                dropped["given before"] += 1
            else:
                tasks[record.task][text] = record
    if not read:
        raise DataError(f"{run} recorded no rollouts; name the folder of a run that samples")
    return read, tasks


def rows_of(task: str, answers: Answers, form: str, dropped: Counter[str]) -> list[dict[str, Any]]:
    """The rows that the answers to one task become. In pairs the rarer kind, right or wrong, stands repeatedly."""
    right = [text for text, record in answers.items() if record.correct]
    wrong = [text for text, record in answers.items() if not record.correct]
    prompt = next(iter(answers.values())).messages[:-1] if answers else []
    if form == "scored":
        return [{"prompt": prompt, "completion": t, "score": float(t in right)} for t in answers]
    if form == "texts":
        dropped["wrong"] += len(wrong)
        return [{"prompt": prompt, "completion": text} for text in right]
    if not (right and wrong):
        dropped["without a counterpart"] += len(answers)
        return []
    dice = random.Random(derive_seed("rollouts_to_rows", task))
    dice.shuffle(right)
    dice.shuffle(wrong)
    pairs = islice(zip(cycle(right), cycle(wrong), strict=False), max(len(right), len(wrong)))
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that sampled")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--form", choices=["pairs", "texts", "scored"], default="pairs")
    arguments = parser.parse_args()
    dropped: Counter[str] = Counter()
    try:
        read, tasks = read_answers(arguments.run, dropped)
    except WhetError as error:
        raise SystemExit(f"error: {error}") from None
    rows = [row for task, found in tasks.items() for row in rows_of(task, found, arguments.form, dropped)]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    arguments.out.write_text("".join(lines), encoding="utf-8")
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    used = read - dropped.total()
    print(f"{read} answers to {len(tasks)} tasks: {used} used, dropped: {reasons or 'none'}")
    print(f"{len(rows)} rows in {arguments.out}")


if __name__ == "__main__":
    main()
