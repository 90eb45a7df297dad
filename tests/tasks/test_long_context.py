"""Facts in a long text are found, and neither copying the text nor naming everything in it pays."""

import asyncio
import json
import re

import pytest

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import DataError
from whet.core.types import Task
from whet.tasks.long_context import NAMES, Items, LongContext

TASKS = LongContext(train_size=1, test_size=0)
TEXT = " ".join(f"word{n}" for n in range(200))


def grade(answer, *known, taskset=TASKS, text=TEXT):
    task = Task("x", [{"role": "user", "content": text}], Items(list(known)))
    return asyncio.run(taskset.grade(task, answer))


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Final Answer: [a, b]", 1),
        ("Let me see.\n\n**Final answer:** [ 'B', \"a\" ].\n", 1),
        ("Final Answer: [a]", 2 / 3),
        ("Final Answer: [a, c]", 0.5),
        ("Final Answer: [a, a]", 2 / 3),
        ("Final Answer: [c, d]", 0),
        ("Final Answer: [a, b, c]", 0),
        ("Final Answer: [a, b, a, b]", 0),
        ("Final Answer: []", 0),
        ("Final Answer: a, b", 0),
        ("Final Answer: [a, b", 0),
        ("Final Answer: [a, b]\nThat is it.", 0),
        ("[a, b]", 0),
        ("", 0),
        ("Final Answer: [a, b]" * 5000, 0),
        ("Final Answer: [" + "]" * 50_000 + "x", 0),
        ("Final Answer:" + " " * 50_000 + "x", 0),
        ("Final Answer: [a\x00, b]", 0.5),
    ],
)
def test_the_last_line_lists_the_items_and_no_more_than_there_are(answer, reward):
    with cpu_seconds_below(5):
        scores = grade(answer, "a", "B")
    assert scores["reward"] == pytest.approx(reward)
    assert scores["correct"] == float(reward == 1)


def test_exactly_all_items_can_be_asked_for_and_none_can_be_right():
    exact = LongContext(train_size=1, test_size=0, score="exact")
    assert grade("Final Answer: [a]", "a", "b", taskset=exact) == {"reward": 0, "correct": 0, "format": 1, "copied": 0}
    assert grade("Final Answer: []")["reward"] == 1
    assert grade("Final Answer: [a]")["reward"] == 0
    assert grade("Final Answer: [Paris, France]", "Paris, France", taskset=exact)["reward"] == 1


def test_a_copy_of_the_text_earns_nothing_and_a_quotation_costs_nothing():
    words = TEXT.split()
    quoted, copied = " ".join(words[50:75]), " ".join(words[:60])
    broken = ". And ".join(" ".join(words[start : start + 12]) for start in range(0, 200, 12))
    assert grade(f"It says: {quoted}.\nFinal Answer: [a]", "a")["reward"] == 1
    for copy in (TEXT, copied, broken, TEXT.upper(), f"{quoted} {quoted} {quoted}"):
        assert grade(f"{copy}\nFinal Answer: [a]", "a") == {"reward": 0, "correct": 0, "format": 1, "copied": 1}
    assert grade("thinking " * 500 + "\nFinal Answer: [a]", "a")["reward"] == 1


def facts(task):
    return re.findall(r"(\w+) leads to (\w+)", task.prompt[-1]["content"])


def solve(task):
    """Return the answer that a simple parser of the text finds."""
    text = task.prompt[-1]["content"]
    question = text.split("\n\n")[1]
    if numbers := dict(re.findall(r"The number of (\w+) is (\d+)", text)):
        return {numbers[name] for name in re.findall(r"the number of (\w+)", question)}
    if settings := re.findall(r"(\w+) is set to (\w+)", text):
        values = {}
        for name, value in settings:
            values[name] = values.get(value, value)
        return {name for name, value in values.items() if value == re.search(r"\d+", question)[0]}
    edges, (node,) = set(facts(task)), [name for name in NAMES if re.search(rf"\b{name}\b", question)]
    near = {other for one, other in edges if one == node}
    if "two steps" in question:
        return {other for one, other in edges if one in near} - near - {node}
    return near if question.startswith("To which") else {one for one, other in edges if other == node}


@pytest.mark.parametrize("kind", ["needle", "needles", "variables", "graph"])
@pytest.mark.parametrize("items", [1, 4])
def test_the_answer_equals_that_of_a_simple_parser(kind, items):
    taskset = LongContext(kinds=(kind,), items=items, train_size=60, test_size=20)
    for task in taskset.tasks("train"):
        assert set(task.data.answer) == solve(task)
        assert len(task.data.answer) == len(set(task.data.answer)) > 0
        text = task.prompt[-1]["content"].split("\n\n")[0]
        assert all(text.count(fact) == 1 for fact in re.findall(r"[^.]+ leads to \w+\.", text))


@pytest.mark.parametrize("words", [1, 500, 20_000])
def test_the_text_is_as_long_as_asked_for(words):
    task = LongContext(words=words, train_size=2, test_size=0, kinds=("needle",)).tasks("train")[0]
    assert 0.8 * words <= len(task.prompt[-1]["content"].split()) <= 1.2 * words + 60


def test_naming_every_name_or_number_of_the_text_earns_nothing():
    taskset = LongContext(train_size=100, test_size=0)
    for task in taskset.tasks("train"):
        found = set(re.findall(r"\d+", task.prompt[-1]["content"])) | set(NAMES)
        assert asyncio.run(taskset.grade(task, f"Final Answer: [{', '.join(found)}]"))["reward"] == 0


def test_rows_of_graphwalks_and_ruler_are_read(tmp_path):
    gym = {"responses_create_params": {"input": [{"role": "user", "content": "one?"}]}, "expected_answer": '["a", "b"]'}
    rows = [gym, {"prompt": "two?", "answer_nodes": ["a", "b"]}, {"prompt": "three?", "outputs": ["a", "b"]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    taskset = LongContext(path=str(path), test_size=0)
    assert [task.data.answer for task in taskset.tasks("train")] == [["a", "b"]] * 3
    path.write_text('{"answer": "a"}')
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'prompt' is missing"):
        taskset.model_copy().read(str(path))
