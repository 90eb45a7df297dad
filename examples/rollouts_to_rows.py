"""Write a run's graded answers as rows to learn from: pairs of a right and a wrong answer to the same task, right
answers alone, or every answer with a score of 1 or 0. An answer that calls an undeclared tool counts as wrong.

    whet train quickstart optimizer.lr=0 --folder runs/sample        # a learning rate of 0 only samples
    python examples/rollouts_to_rows.py runs/sample pairs.jsonl
"""

import argparse
import json
import random
from collections import Counter
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any

from whet.base.errors import DataError, WhetError
from whet.base.seeds import derive_seed
from whet.core.content import text_of
from whet.core.types import Message
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.tasks.tools.hallucination import invokes_tool

Answers = dict[str, RolloutRecord]  # the different answers to one task, by their text


def read_answers(run: Path, dropped: Counter[str]) -> tuple[int, dict[str, Answers]]:
    """Return the number of answers read, and the kept answers by task. Dropped answers are counted by reason."""
    read, tasks = 0, dict[str, Answers]()
    for step in rollout_steps(run):
        for record in read_rollouts(run, step):
            read += 1
            last = record.messages[-1] if record.messages else None
            said = json.dumps([plain(message) for message in record.messages])
            if record.correct is None:
                dropped["failed"] += 1
            elif last is None or not (text_of(last["content"]).strip() or last.get("tool_calls")):
                dropped["empty"] += 1
            elif said in tasks.setdefault(record.task, {}):
                dropped["given before"] += 1
            else:
                tasks[record.task][said] = record
    if not read:
        raise DataError(f"{run} recorded no rollouts; name the folder of a run that samples")
    return read, tasks


def plain(message: Message) -> dict[str, Any]:
    """Return the message in the form of rows, with its content as text."""
    kept = {key: part for key, part in message.items() if key != "malformed_calls"}
    content = text_of(message["content"])
    return kept | {"content": content.strip() if message["role"] == "assistant" else content}


def prompt_size(answers: Answers) -> int:
    """Return the number of messages before the first reply in which the answers to a task differ."""
    talks = [record.messages for record in answers.values()]
    same = len([*takewhile(lambda said: all(one == said[0] for one in said), zip(*talks, strict=False))])
    most = min([same, *(len(talk) - 1 for talk in talks)])
    return next(size for size in range(most, 0, -1) if all(talk[size]["role"] == "assistant" for talk in talks))


def is_right(record: RolloutRecord) -> bool:
    """Return whether the grader accepted it, and it calls no undeclared tool."""
    replies = (message for message in record.messages if message["role"] == "assistant")
    return bool(record.correct) and (bool(record.tools) or not any(map(invokes_tool, replies)))


def rows_of(task: str, answers: Answers, form: str, dropped: Counter[str]) -> list[dict[str, Any]]:
    """Return the rows of the answers to one task. In pairs the rarer kind, right or wrong, is repeated."""
    if not answers:
        return []
    size, one = prompt_size(answers), next(iter(answers.values()))
    begin: dict[str, Any] = {"prompt": [plain(message) for message in one.messages[:size]]}
    if one.tools:
        begin["tools"] = one.tools
    parts = {said: _answer(record.messages[size:]) for said, record in answers.items()}
    right = [parts[said] for said, record in answers.items() if is_right(record)]
    wrong = [parts[said] for said, record in answers.items() if not is_right(record)]
    if form == "scored":
        return [begin | {"completion": parts[said], "score": float(is_right(one))} for said, one in answers.items()]
    if form == "texts":
        dropped["wrong"] += len(wrong)
        return [begin | {"completion": text} for text in right]
    if not (right and wrong):
        dropped["without a counterpart"] += len(answers)
        return []
    dice = random.Random(derive_seed("rollouts_to_rows", task))
    dice.shuffle(right)
    dice.shuffle(wrong)
    pairs = islice(zip(cycle(right), cycle(wrong), strict=False), max(len(right), len(wrong)))
    return [begin | {"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]


def _answer(messages: list[Message]) -> str | list[dict[str, Any]]:
    """Return the text of a single plain reply, otherwise the messages."""
    said = [plain(message) for message in messages]
    return said[0]["content"] if len(said) == 1 and said[0].keys() == {"role", "content"} else said


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
