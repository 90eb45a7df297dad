"""Benchmarks by name: rows in their published columns, and where rows must lie."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.base.errors import ConfigError, DataError
from whet.tasks.benchmarks import BENCHMARKS, benchmark

PROBLEM = {"problem": "What is 2 + 2?", "answer": "4"}
ROWS: dict[str, dict[str, Any]] = {
    "aime24": {"id": 60, "solution": "", "url": "", "year": "2024", **PROBLEM},
    "aime25": {"problem_idx": 1, "problem_type": ["Algebra"], **PROBLEM, "answer": 70},
    "math-500": {"solution": "\\boxed{4}", "subject": "Algebra", "level": 2, "unique_id": "test/1.json", **PROBLEM},
    "gsm8k": {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    "ifeval": {
        "key": 1, "prompt": "Write. No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}],
    },
    "mmlu-stem": {"question": "2 + 2?", "options": ["3", "4"], "answer": "B", "topic": "algebra", "id": 0},
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def two():\n    \"\"\"Return 2.\"\"\"\n", "entry_point": "two",
        "canonical_solution": "    return 2\n", "test": "def check(candidate):\n    assert candidate() == 2\n",
    },
    "mbpp": {
        "task_id": 11, "text": "Write a function two that returns 2.", "code": "def two():\n    return 2",
        "test_list": ["assert two() == 2"], "test_setup_code": "", "challenge_test_list": [],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHET_BENCHMARKS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_in_published_columns_become_tasks(name: str, folder: Path) -> None:
    (folder / BENCHMARKS[name].file).write_text(json.dumps(ROWS[name]) + "\n")
    (task,) = benchmark(name).tasks("train")
    assert task.prompt[-1]["role"] == "user"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_file_is_named_with_where_its_rows_are_published(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        benchmark(name)
    assert f"its rows must lie in {folder / BENCHMARKS[name].file}" in str(error.value)
    assert BENCHMARKS[name].hub in str(error.value)


def test_without_a_file_the_rows_come_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    asked = []

    class Made:
        def __init__(self, **settings: Any) -> None:
            asked.append(settings)

        def tasks(self, split: str) -> None:
            if len(asked) > 1:
                raise DataError("no network")

    made: Any = Made
    stem = replace(BENCHMARKS["mmlu-stem"], make=made)
    assert isinstance(stem.task_set(), Made)
    assert asked == [{"path": "hf:TIGER-Lab/MMLU-STEM:test", "test_size": 0, "columns": {"options": "choices"}}]
    with pytest.raises(
        DataError, match=r"mmlu-stem\.jsonl does not exist, and its rows can't come from the Hub: no net"
    ):
        stem.task_set()


def test_an_unknown_name_gets_the_most_similar_one() -> None:
    with pytest.raises(ConfigError, match=r"called 'math500'\. Did you mean 'math-500'\?.*Benchmarks: aime24, "):
        benchmark("math500")
    with pytest.raises(ConfigError, match=r"Did you mean 'arithmetic'\?.*Task sets: agent, "):
        benchmark("arithmetics")


def test_an_interval_in_a_text_is_an_answer(folder: Path) -> None:
    (folder / "math-500.jsonl").write_text(json.dumps({"problem": "The range?", "answer": "[-9, 9]"}))
    assert benchmark("math-500").tasks("train")[0].data.answer == "[-9, 9]"
