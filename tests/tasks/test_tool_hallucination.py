"""An answer in words earns 1; a tool call, parsed or not, earns 0 and counts into the rate."""

import asyncio
import json

import pytest

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import DataError
from whet.chat.call_formats import CallFormat
from whet.chat.replies import ReplyFormat
from whet.tasks.tools.hallucination import ToolHallucination, invokes_tool
from whet.tasks.validate import validate, wrong

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def step(taskset, task, reply):
    return asyncio.run(taskset.make(task).step(reply))


@pytest.mark.parametrize("declare", ["none", "unfit"])
def test_all_cases_earn_their_expected_rewards(declare):
    graded = asyncio.run(validate(ToolHallucination(declare=declare, train_size=50, test_size=20), 5))
    assert not wrong(graded)
    assert {"good", "bad", "boundary", "adversarial", "gold"} <= {one.kind for one in graded}


@pytest.mark.parametrize(
    "calls",
    [None, CallFormat("json"), CallFormat("json", "<tool_call>", "</tool_call>"), CallFormat("named", "[TOOL_CALLS]")],
)
@pytest.mark.parametrize("text", [HERMES, "<tool_call>{", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'])
def test_a_call_counts_whichever_format_the_model_is_read_in(calls, text):
    assert invokes_tool(ReplyFormat(calls).parse(text))


@pytest.mark.parametrize(
    ("text", "invokes"),
    [
        ("search('x')", True),
        ("print(python('1 + 1'))", True),
        ("tools.web_search(query='x')", True),
        ("<search>x</search>", True),
        ("lookup(3)", True),
        ('{"name": "Ada", "age": 36}', False),
        ("Research (a lot) helps.", False),
        ("f(x) = 3", False),
        ("max(2, 3)", False),
        ("Use `add(a=1)` if you have it.", False),
        ("1. calculate (by hand)\n2. compare", False),
    ],
)
def test_lines_with_calls_are_distinguished_from_prose_formulas_and_data(text, invokes):
    assert invokes_tool({"role": "assistant", "content": text}, ["my.lookup"]) is invokes


def test_a_call_in_a_thought_does_not_count():
    assert not invokes_tool({"role": "assistant", "content": "No.", "reasoning_content": HERMES})


@pytest.mark.parametrize("text", ["search(" * 40_000, "```" * 40_000, "(" * 100_000, " " * 200_000, "a." * 90_000])
def test_long_replies_are_read_quickly(text):
    with cpu_seconds_below(5):
        invokes_tool({"role": "assistant", "content": text}, ["f"])


def test_accuracy_counts_replies_without_a_call_and_an_empty_one_earns_nothing():
    taskset = ToolHallucination(train_size=5, test_size=2)
    task = taskset.tasks("train")[0]
    empty, called = (step(taskset, task, {"role": "assistant", "content": text}) for text in (" ", HERMES))
    assert (empty.reward, empty.scores["correct"], empty.scores["tool_invoked"]) == (0, 1, 0)
    assert (called.reward, called.scores["correct"], called.scores["tool_invoked"]) == (0, 0, 1)


def test_rows_of_bfcl_keep_their_turns_and_their_functions_become_schemas(tmp_path):
    point = {
        "type": "dict",
        "properties": {"type": {"type": "float"}, "at": {"type": "tuple", "items": {"type": "any"}}},
    }
    asked = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How far is it?"}]]
    row = {"id": "irrelevance_0", "question": asked, "function": [{"name": "a.b", "parameters": point}]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row))
    taskset = ToolHallucination(path=str(path), test_size=0, declare="unfit")
    task = taskset.tasks("train")[0]
    shown = asyncio.run(taskset.make(task).start())
    assert [message["role"] for message in shown.messages] == ["system", "user"]
    assert shown.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "at": {"type": "array", "items": {}}},
    }
    undeclared = ToolHallucination(path=str(path), test_size=0)
    assert asyncio.run(undeclared.make(undeclared.tasks("train")[0]).start()).tools is None
    assert step(taskset, task, {"role": "assistant", "content": "b(3)"}).scores["tool_invoked"] == 1
    path.write_text(json.dumps({"question": [], "function": []}))
    with pytest.raises(DataError, match=r"rows.json:1: field 'question'"):
        ToolHallucination(path=str(path), test_size=0).tasks("train")


def test_tools_that_do_not_fit_are_never_the_one_that_is_asked_for():
    for task in ToolHallucination(declare="unfit", train_size=300, test_size=50).tasks("train"):
        name = task.data.tools[0]["function"]["name"]
        assert ("weather" in task.prompt[-1]["content"]) <= (name != "get_weather")


@pytest.mark.parametrize(
    "text", ["\n" * 20_000, " " * 20_000, "search(" + ")" * 19_000 + "x", "a." * 10_000, "Action:\n" * 2_500]
)
def test_endless_repetition_takes_no_time(text):
    with cpu_seconds_below(5):
        assert not invokes_tool({"role": "assistant", "content": text})
