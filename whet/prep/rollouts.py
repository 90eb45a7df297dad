"""Rows to learn from out of the graded answers of a run: pairs of a right and a wrong answer to the same task, right
answers alone, or every answer with a score of 1 or 0. An answer that calls an undeclared tool counts as wrong."""

import json
import random
from collections import Counter
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Literal

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.content import image_urls, text_of
from whet.core.types import Message
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.tasks.tools.hallucination import invokes_tool

Form = Literal["pairs", "texts", "scored"]
Answers = dict[str, RolloutRecord]  # the different answers to a task, by their text


def write_rows(run: Path, out: Path, form: Form = "pairs") -> str:
    """Write the rows of a run's answers to a JSONL file; return an account of all answers. Raises ``DataError`` if the
    run recorded no answers, or none of them makes a row."""
    dropped: Counter[str] = Counter()
    read, tasks = read_answers(run, dropped)
    rows = [row for task, answers in tasks.items() for row in rows_of(task, answers, form, dropped)]
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    account = f"{read} answers to {len(tasks)} tasks: {read - dropped.total()} used, dropped: {reasons or 'none'}"
    if not rows:
        raise DataError(f"{run}: no answer makes a row ({account}); sample more answers, or at a higher temperature")
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return f"{account}\n{len(rows)} rows in {out}"


def read_answers(run: Path, dropped: Counter[str]) -> tuple[int, dict[str, Answers]]:
    """Return the number of answers read, and the kept answers by task. Dropped answers are counted by reason."""
    read, tasks = 0, dict[str, Answers]()
    for step in rollout_steps(run):
        for record in read_rollouts(run, step):
            read += 1
            last = record.messages[-1] if record.messages else None
            text = json.dumps([_plain(message) for message in record.messages])
            if record.correct is None:
                dropped["failed"] += 1
            elif last is None or not (text_of(last["content"]).strip() or last.get("tool_calls")):
                dropped["empty"] += 1
            elif text in tasks.setdefault(record.task, {}):
                dropped["given before"] += 1
            else:
                tasks[record.task][text] = record
    if not read:
        what = "recorded no rollouts" if run.is_dir() else "is not a folder"
        raise DataError(f"{run} {what}; name the folder of a run that samples")
    return read, tasks


def rows_of(task: str, answers: Answers, form: Form, dropped: Counter[str]) -> list[dict[str, object]]:
    """Return the rows of the answers to a task. In pairs the rarer kind, right or wrong, is repeated."""
    if not answers:
        return []
    if (size := _prompt_size(answers)) is None:
        dropped["without a common prompt"] += len(answers)
        return []
    first = next(iter(answers.values()))
    begin: JsonObject = {"prompt": [_plain(message) for message in first.messages[:size]]}
    if first.tools:
        begin["tools"] = first.tools
    parts = {text: _answer(record.messages[size:]) for text, record in answers.items()}
    right = [parts[text] for text, record in answers.items() if _is_right(record)]
    wrong = [parts[text] for text, record in answers.items() if not _is_right(record)]
    if form == "scored":
        return [
            begin | {"completion": parts[text], "score": float(_is_right(record))} for text, record in answers.items()
        ]
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


def _plain(message: Message) -> JsonObject:
    """Return the message in the form of rows, with its content as text unless it has images."""
    kept = {key: part for key, part in message.items() if key != "malformed_calls"}
    content = message["content"] if image_urls([message]) else text_of(message["content"])
    return kept | {"content": text_of(content).strip() if message["role"] == "assistant" else content}


def _prompt_size(answers: Answers) -> int | None:
    """Return the number of messages before the first reply in which the answers to a task differ. None if they differ
    in a message before that, as where an environment begins each episode differently."""
    talks = [record.messages for record in answers.values()]
    same = len([*takewhile(lambda turn: all(each == turn[0] for each in turn), zip(*talks, strict=False))])
    most = min([same, *(len(talk) - 1 for talk in talks)])
    sizes = range(most, 0, -1)
    return next((size for size in sizes if all(talk[size]["role"] == "assistant" for talk in talks)), None)


def _is_right(record: RolloutRecord) -> bool:
    """Return whether the grader accepted it, and it calls no undeclared tool."""
    replies = (message for message in record.messages if message["role"] == "assistant")
    return bool(record.correct) and (bool(record.tools) or not any(map(invokes_tool, replies)))


def _answer(messages: list[Message]) -> str | list[JsonObject]:
    """Return the text of a single plain reply, otherwise the messages."""
    plain = [_plain(message) for message in messages]
    return plain[0]["content"] if len(plain) == 1 and plain[0].keys() == {"role", "content"} else plain
