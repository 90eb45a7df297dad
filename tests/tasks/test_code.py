"""Programs are graded by running tests; rows of other projects load unchanged, and their flaws are not repeated."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import ConfigError, DataError
from whet.sandbox import sandbox
from whet.sandbox.sandbox import available_isolation
from whet.tasks.code.task_set import Code, program, same_output
from whet.tasks.validate import validate, wrong

isolated = pytest.mark.skipif(available_isolation()[0] is None, reason="this system can't isolate programs")

HUMAN_EVAL = {
    "task_id": "Test/0",
    "prompt": "from typing import List\n\ndef shift(text: str) -> str:\n    return text[1:] + text[:1]\n\n\n"
    'def unshift(text: str) -> str:\n    """ Undo shift. """\n',
    "entry_point": "unshift",
    "canonical_solution": "    return text[-1:] + text[:-1]\n",
    "test": "def check(candidate):\n    for one in ('abc', 'xy', ''):\n        assert candidate(shift(one)) == one\n",
}
MBPP = {
    "text": "Write a function to find the sums of pairs.",
    "code": "class Pair(object):\n    def __init__(self, a, b):\n        self.a = a\n        self.b = b\n"
    "def sums(pairs):\n    return [p.a + p.b for p in pairs]",
    "task_id": 1,
    "test_setup_code": "",
    "test_list": ["assert sums([Pair(1, 2), Pair(3, 4)]) == [3, 7]", "assert sums([]) == []"],
}
CALLS = {
    "question": "Return the halves.",
    "verifier_metadata": {
        "unit_tests": {"inputs": ["[1, 3]\n2", "[]\n1"], "outputs": ["[0.5, 1.5]", "[]"], "fn_name": "f"}
    },
}
STREAMS = {
    "responses_create_params": {"input": [{"role": "user", "content": "Print the sum of each line."}]},
    "verifier_metadata": {"unit_tests": {"inputs": ["1 2\n3 4\n", "5"], "outputs": ["3\n7", "5\n"]}},
}
FAST = "import sys\nread = sys.stdin.buffer.readline\nwhile line := read():\n    print(sum(map(int, line.split())))"
HALVES = "class Solution:\n    def f(self, xs, n):\n        return tuple(x / n for x in xs)"


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\n"


def tasks_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> Code:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Code(path=str(path), test_size=0, limits={"workers": 1, "cpu_s": 2, "deadline_s": 30}, **settings)


def grade(taskset: Code, *answers: str, number: int = 0) -> list[dict[str, float]]:
    async def all_of_them() -> list[dict[str, float]]:
        grading = taskset.open()
        try:
            return [await grading.grade(taskset.tasks("train")[number], answer) for answer in answers]
        finally:
            await grading.close()

    return asyncio.run(all_of_them())


@isolated
@pytest.mark.parametrize(
    ("row", "right", "wrong_one"),
    [
        (
            HUMAN_EVAL,
            "def unshift(text: str) -> str:\n    return text[-1:] + text[:-1]",
            "def unshift(text): return text",
        ),
        (MBPP, MBPP["code"], "class Pair:\n    def __init__(self, *a): pass\ndef sums(pairs): return [3, 7]"),
        (CALLS, HALVES, "def f(xs, n): return xs"),
        (STREAMS, FAST, "print(3)\nprint(7)"),
    ],
    ids=["HumanEval", "MBPP", "calls", "streams"],
)
def test_a_right_program_earns_one_and_a_wrong_one_nothing(
    tmp_path: Path, row: dict[str, Any], right: str, wrong_one: str
) -> None:
    good, bad = grade(tasks_of(tmp_path, row), fenced(right), fenced(wrong_one))
    assert good == {"reward": 1.0, "correct": 1.0, "format": 1.0, "passed": 1.0, "late": 0.0, "cut": 0.0}
    assert bad["reward"] == bad["correct"] == 0.0


@isolated
def test_the_program_gets_helpers_of_its_prompt_but_not_of_its_tests(tmp_path: Path) -> None:
    uses = "def unshift(text):\n    for _ in text[1:]: text = shift(text)\n    return text"
    cheats = "def shift(text): return text\ndef unshift(text): return text"
    used, cheated = grade(tasks_of(tmp_path, HUMAN_EVAL), fenced(uses), fenced(cheats))
    assert (used["reward"], cheated["reward"]) == (1.0, 0.0)


@isolated
def test_the_reward_is_the_share_of_tests_if_the_recipe_sets_it(tmp_path: Path) -> None:
    half = fenced("print(5)")
    assert grade(tasks_of(tmp_path, STREAMS), half)[0]["reward"] == 0.0
    scores = grade(tasks_of(tmp_path, STREAMS, reward="share"), half)[0]
    assert (scores["reward"], scores["correct"], scores["passed"]) == (0.5, 0.0, 0.5)


@isolated
def test_time_for_all_tests_is_bounded(tmp_path: Path) -> None:
    many = {"question": "?", "verifier_metadata": {"unit_tests": {"inputs": ["1"] * 50, "outputs": ["1"] * 50}}}
    slow = fenced("import time\ntime.sleep(1)\nprint(input())")
    scores = grade(tasks_of(tmp_path, many, reward="share", total_s=8.0), slow)[0]
    assert 0 < scores["passed"] < 0.2
    assert scores["reward"] == scores["passed"]


@isolated
def test_the_last_block_is_tested_and_text_without_a_block_earns_nothing(tmp_path: Path) -> None:
    taskset = tasks_of(tmp_path, STREAMS)
    answers = (
        FAST,
        f"```\n{FAST}",
        fenced(FAST) + fenced("pass"),
        fenced("pass") + fenced(FAST),
        f"`{FAST}`",
        "```\n```",
    )
    assert [scores["reward"] for scores in grade(taskset, *answers)] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


FENCES = {
    "with the output of an example": f"{fenced(FAST)}It prints:\n```\n3\n7\n```\n",
    "before a command": f"{fenced(FAST)}```bash\npython add.py\n```",
    "before JSON": f"```py\n{FAST}\n```\n```json\n{{}}\n```",
    "with CRLF": fenced(FAST).replace("\n", "\r\n"),
    "in a list": "1. Add:\n" + "".join(f"   {line}\n" for line in fenced(FAST).splitlines()[1:]),
    "with four marks": f"````python\n{FAST}\n# ```\n````",
    "with tildes": f"~~~python\n{FAST}\n~~~",
    "with text behind it": f"```python\n{FAST}\n``` This adds the numbers.",
    "with a fence in a docstring": '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    + f"{FAST}\n```",
    "that says how it is shown": f"```python title='add.py'\n{FAST}\n```",
    "with an import from the future": f"```python\nfrom __future__ import annotations\n{FAST}\n```",
    "with two of them": f"```python\nfrom __future__ import (annotations,\n    division)\n{FAST}\n```",
}


@isolated
def test_blocks_are_parsed_by_the_rules_of_markdown(tmp_path: Path) -> None:
    scores = grade(tasks_of(tmp_path, STREAMS), *FENCES.values())
    assert dict(zip(FENCES, [one["reward"] for one in scores], strict=True)) == dict.fromkeys(FENCES, 1.0)


@pytest.mark.parametrize("text", ["```python\n", "```\n", "~~~x y\n", "    ```\n", "`" * 80 + "\n", "\n", "``` ```\n"])
def test_fences_are_found_in_time_that_grows_with_the_reply(text: str) -> None:
    with cpu_seconds_below(5):
        program(text * 20_000)


@isolated
def test_a_long_output_is_compared_and_a_cut_one_is_marked(tmp_path: Path) -> None:
    long = {"question": "?", "input_output": {"inputs": ["3000000"], "outputs": ["x" * 3_000_000]}}
    right, flood = "print('x' * int(input()))", "print('x' * 4_000_000)"
    scores = grade(tasks_of(tmp_path, long), fenced(right), fenced(flood))
    assert [(one["reward"], one["cut"]) for one in scores] == [(1.0, 0.0), (0.0, 0.0)]
    most = fenced("import os\nwhile True: os.write(1, bytes(1 << 20))")
    assert grade(tasks_of(tmp_path, long), most)[0]["cut"] == 1
    small = Code(path=str(tmp_path / "rows.jsonl"), test_size=0, limits={"workers": 1, "output_kib": 3000})
    assert [(one["reward"], one["cut"]) for one in grade(small, fenced(right), fenced(flood))] == [
        (1.0, 0.0),
        (0.0, 1.0),
    ]


@isolated
@pytest.mark.parametrize(
    ("wanted", "got", "right"),
    [
        ("1000000", "1000000.0", 1.0),
        ("1000000", "1000004.0", 0.0),
        ("5", "5.000001", 0.0),
        ("0.33333", "1 / 3", 1.0),
        ("1000000.0", "1000004.0", 0.0),
        ("2e-06", "9e-06", 0.0),
        ("0.5", "float('nan')", 0.0),
        ("[1, 2]", "(1, 2)", 1.0),
        ('{"a": [0.5]}', "{'a': (0.500001,)}", 1.0),
        ('"1"', "1", 0.0),
    ],
)
def test_values_are_compared_by_the_type_of_the_expected_value(
    tmp_path: Path, wanted: str, got: str, right: float
) -> None:
    row = {"question": "f?", "input_output": {"fn_name": "f", "inputs": ["1"], "outputs": [wanted]}}
    assert grade(tasks_of(tmp_path, row), fenced(f"def f(x): return {got}"))[0]["reward"] == right


@isolated
def test_expected_outputs_are_nowhere_in_the_program(tmp_path: Path) -> None:
    """In Gym 0.7 a walk over the frames that prints ``gt_out`` passes every test."""
    walk = """
import sys, gc
frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
text = repr(seen) + repr(gc.get_objects())
import re
print(*re.findall('94[0-9]{3}', text)[:1])
"""
    secret = {"question": "?", "verifier_metadata": {"unit_tests": {"inputs": [""], "outputs": ["94321"]}}}
    assert grade(tasks_of(tmp_path, secret), fenced(walk.strip()))[0]["reward"] == 0.0


@isolated
def test_cases_earn_their_expected_rewards() -> None:
    taskset = Code(train_size=30, test_size=5, limits={"workers": 1, "cpu_s": 1})
    graded = asyncio.run(validate(taskset, samples=5))
    assert len(graded) >= 19
    assert not wrong(graded)


def test_generated_tasks_are_the_same_in_every_run_and_different_with_another_seed() -> None:
    first, again, other = (Code(train_size=50, test_size=10, seed=seed).tasks("train") for seed in (0, 0, 1))
    assert list(first) == list(again) != list(other)
    assert len({task.prompt[-1]["content"] for task in first}) == 50


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"verifier_metadata": {"unit_tests": {"inputs": [], "outputs": []}}}, "there are no tests"),
        ({"verifier_metadata": None}, "there are no tests"),
        ({"verifier_metadata": {"unit_tests": {"inputs": ["1", "2"], "outputs": ["1"]}}}, "2 inputs and 1 outputs"),
        ({"verifier_metadata": {"unit_tests": {"inputs": [1], "outputs": ["1"]}}}, "must be texts"),
        ({"verifier_metadata": None, "test_list": ["assert f(1) == "]}, "a test is not valid Python"),
        ({"verifier_metadata": {"unit_tests": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}}}, "not JSON"),
        ({"responses_create_params": None}, "the question is missing"),
    ],
)
def test_rows_that_can_not_be_graded_are_errors_with_their_place(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{complaint}"):
        tasks_of(tmp_path, STREAMS | change).tasks("train")


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ("3\n7\n", "3\n7", True),
        (" 3 \n7  ", "3\n7", True),
        ("3.0 1e", "3 1e", True),
        ("0.50", ".5", True),
        ("3 7", "3\n7", False),
        ("3\n7\n8", "3\n7", False),
        ("", "3", False),
        ("NaN", "nan", False),
        ("sNaN", "3", False),
        ("٣", "3", False),
        ("1" * 101, "1" * 100, False),
        ("Yes", "YES", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(got: str, wanted: str, same: bool) -> None:
    assert same_output(got, wanted) is same


def test_it_refuses_to_open_where_nothing_isolates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sandbox, "available_isolation", lambda: (None, ["namespaces: unshare: Operation not permitted"])
    )
    with pytest.raises(ConfigError, match=r"can't be isolated here.*data\.sandbox=none"):
        tasks_of(tmp_path, STREAMS).open()
    taskset = tasks_of(tmp_path, STREAMS, sandbox="none")
    assert grade(taskset, fenced(FAST))[0]["reward"] == 1.0
