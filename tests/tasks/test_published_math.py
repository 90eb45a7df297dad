"""Published sets of problems, named in a recipe, are read in their columns."""

from pathlib import Path
from typing import Any

import pytest

from tests.rows import write_rows
from whet.base.errors import DataError
from whet.config import Component
from whet.tasks.base import TASK_SETS
from whet.tasks.math.dataset import GSM8K, Math

ASKED = "What is 1 + 1?"
PUBLISHED: dict[str, dict[str, Any]] = {
    "dapo_math": {
        "prompt": ASKED, "solution": "2", "data_source": "math_dapo", "source_prompt": [], "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "1"},
    },
    "deepscaler": {"problem": ASKED, "answer": "2", "solution": "One and one is two."},
    "hendrycks_math": {
        "problem": ASKED, "solution": r"So $\boxed{2}$.", "answer": "2", "subject": "Algebra", "level": 1,
        "unique_id": "train/algebra/1.json",
    },
    "numinamath": {
        "problem": ASKED, "solution": "2.", "answer": "2", "problem_type": "Algebra",
        "question_type": "math-word-problem", "problem_is_valid": "Yes", "solution_is_valid": "Yes",
        "source": "cn_contest", "synthetic": False,
    },
    "skywork_or1_math": {
        "data_source": "train-math-deepscaler", "prompt": [{"content": ASKED, "role": "user"}], "ability": "math",
        "reward_model": {"ground_truth": '["2"]', "style": "rule"},
        "extra_info": {"index": 1, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 2}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_in_its_columns(name: str, tmp_path: Path) -> None:
    _, preset = Component(TASK_SETS).resolve(name)
    assert isinstance(preset, Math)
    assert preset.path.startswith("hf:")
    path = write_rows(tmp_path / "rows.jsonl", [PUBLISHED[name]])
    local = preset.model_copy(update={"path": str(path), "test_path": None, "test_size": 0})
    (task,) = local.tasks("train")
    assert ASKED in task.prompt[-1]["content"]
    gold = local.gold(task)
    assert gold is not None
    assert "2" in str(gold)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_in_other_columns_are_answered_with_the_likely_one(name: str, tmp_path: Path) -> None:
    _, preset = Component(TASK_SETS).resolve(name)
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "1", "completion": "2", "prompt": ASKED}])
    local = preset.model_copy(update={"path": str(path), "test_path": None, "test_size": 0})
    expected = (
        r"rows.jsonl:1: .* \(fields of this row: id, completion, prompt; if 'prompt' is meant, set columns={problem"
    )
    with pytest.raises(DataError, match=expected):
        local.tasks("train")


def test_gsm8k_in_other_columns(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": ASKED, "answer": "#### 2"}])
    with pytest.raises(DataError, match=r"if 'prompt' is meant, set columns={question: prompt}"):
        GSM8K(path=str(path), test_size=0).tasks("train")
    (task,) = GSM8K(path=str(path), test_size=0, columns={"question": "prompt"}).tasks("train")
    assert ASKED in task.prompt[-1]["content"]
