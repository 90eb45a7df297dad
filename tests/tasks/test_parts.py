"""Prompts in parts: every family of environments takes them, grades as before, and refuses an image in words."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.chat.test_parts import CUTS, in_parts, part
from whet.base.errors import DataError
from whet.core.content import text_of
from whet.core.types import Task
from whet.tasks.base import TaskSet
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.code.task_set import Code
from whet.tasks.games import Guessing, SlidingPuzzle
from whet.tasks.gym.tasks import NemoGym
from whet.tasks.instructions.task_set import InstructionFollowing
from whet.tasks.judges.genrm_training import GenRMTraining
from whet.tasks.judges.prompts import conversation
from whet.tasks.long_context import LongContext
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.math.dataset import Math
from whet.tasks.prompts import Prompts
from whet.tasks.structured.task_set import StructuredOutput
from whet.tasks.tools.calculator import Calculator
from whet.tasks.tools.corpus_search import CorpusSearch
from whet.tasks.tools.hallucination import ToolHallucination
from whet.tasks.validate import validate

pytestmark = pytest.mark.usefixtures("forked_children")

FAMILIES: list[TaskSet] = [
    Arithmetic(train_size=10, test_size=2),
    MultipleChoice(train_size=10, test_size=2),
    LongContext(train_size=10, test_size=2),
    InstructionFollowing(train_size=10, test_size=2),
    StructuredOutput(train_size=10, test_size=2),
    Guessing(train_size=10, test_size=2),
    SlidingPuzzle(train_size=10, test_size=2),
    Calculator(train_size=10, test_size=2),
    CorpusSearch(train_size=10, test_size=2),
    ToolHallucination(train_size=10, test_size=2),
    GenRMTraining(train_size=10, test_size=2),
]


def cut(taskset: TaskSet, *cuts: int) -> TaskSet:
    """The task set with its prompts in parts."""
    kind = type(taskset)

    def tasks(self: TaskSet, split: str) -> list[Task]:
        given = kind.tasks(self, split)
        return [Task(t.uid, [in_parts(m, *cuts) for m in t.prompt], t.data, t.environment) for t in given]

    made: TaskSet = type(kind.__name__, (kind,), {"tasks": tasks, "__module__": __name__})(**taskset.model_dump())
    return made


@pytest.mark.parametrize("taskset", FAMILIES, ids=lambda taskset: type(taskset).__name__)
def test_every_family_grades_answers_to_a_prompt_in_parts_as_before(taskset: TaskSet) -> None:
    parts = cut(taskset, 3, 11)
    assert isinstance(parts.tasks("train")[0].prompt[-1]["content"], list)
    assert asyncio.run(validate(parts, 3)) == asyncio.run(validate(taskset, 3))


@pytest.mark.parametrize("taskset", FAMILIES[:3], ids=lambda taskset: type(taskset).__name__)
@settings(max_examples=8, deadline=None)
@given(cuts=CUTS)
def test_no_splitting_changes_a_grade(taskset: TaskSet, cuts: list[int]) -> None:
    assert asyncio.run(validate(cut(taskset, *cuts), 1)) == asyncio.run(validate(taskset, 1))


ROWS: dict[str, tuple[type[TaskSet], dict[str, Any]]] = {  # PROMPT stands for the messages
    "choice": (MultipleChoice, {"responses_create_params": {"input": "PROMPT"}, "options": ["x", "y"], "answer": "A"}),
    "code": (Code, {"prompt": "PROMPT", "input_output": {"inputs": ["1"], "outputs": ["1"]}}),
    "gym": (NemoGym, {"responses_create_params": {"input": "PROMPT"}}),
    "instructions": (
        InstructionFollowing,
        {
            "responses_create_params": {"input": "PROMPT"},
            "instruction_id_list": ["change_case:english_lowercase"],
            "kwargs": [{}],
        },
    ),
    "comparison": (
        GenRMTraining,
        {"context": "PROMPT", "response1": "a", "response2": "b", "score_1": 3, "score_2": 4, "ranking": 5},
    ),
    "prompts": (Prompts, {"prompt": "PROMPT", "column": 1}),
    "DAPO": (Math, {"prompt": "PROMPT", "reward_model": {"ground_truth": "5"}}),
    "tools": (ToolHallucination, {"question": ["PROMPT"], "function": []}),
}


def read(tmp_path: Path, name: str, *contents: Any) -> list[Task]:
    kind, row = ROWS[name]
    lines = [json.dumps(row).replace('"PROMPT"', json.dumps([{"role": "user", "content": one}])) for one in contents]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    given: dict[str, Any] = {"path": str(path), "test_size": 1}
    if kind is NemoGym:
        given["servers"] = {"it": "http://gym.test"}
    tasks = kind(**given)
    return sorted([*tasks.tasks("train"), *tasks.tasks("test")], key=lambda task: conversation(task.prompt))


@pytest.mark.parametrize("name", ROWS)
def test_rows_may_hold_prompts_in_parts(tmp_path: Path, name: str) -> None:
    texts = [f"What is {n} plus 2, in words?" for n in range(4)]
    expected = [conversation(task.prompt) for task in read(tmp_path, name, *texts)]
    tasks = read(tmp_path, name, *([part(text[:7]), part(text[7:])] for text in texts))
    assert [conversation(task.prompt) for task in tasks] == expected
    if name in ("choice", "code", "gym", "instructions", "prompts", "tools"):
        assert all(isinstance(task.prompt[-1]["content"], list) for task in tasks), "templates get the parts"
    assert all(text_of(message["content"]) for task in tasks for message in task.prompt)


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"DAPO", "prompts"}))  # prompts may hold images
@pytest.mark.parametrize("kind", ["image", "image_url", "input_image"])
def test_an_image_in_a_row_is_refused_in_words(tmp_path: Path, name: str, kind: str) -> None:
    content = [part("see"), {"type": kind, "image_url": {"url": "x"}}]
    words = rf"rows\.jsonl:2: field '.*' must hold text only, not a part of type '{kind}'"
    with pytest.raises(DataError, match=words):
        read(tmp_path, name, "1 + 1?", content, "3 + 3?")
