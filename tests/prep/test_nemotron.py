"""Rows in the published columns of Nemotron 3 Nano's blend: placeholders are resolved, and all other rows unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rows import write_rows
from whet.base.errors import ConfigError, DataError
from whet.config import load
from whet.prep.config import PrepConfig
from whet.prep.manifest import Manifest
from whet.prep.prepare import prepare
from whet.tasks.gym.tasks import NemoGym
from whet.tasks.math.dataset import Math

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
DAPO = [
    {
        "prompt": [{"role": "user", "content": f"{BEFORE}a\n\nb\n\n{i}?{AFTER}"}],
        "reward_model": {"ground_truth": f"{i}"},
    }
    for i in range(5)
]
SKYWORK = [{"prompt": [{"role": "user", "content": "Root?"}], "reward_model": {"ground_truth": '["\\\\frac12"]'}}]
AGENT = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
TEMPLATE = {"prefix": "Solve it.\n\n", "suffix": "\n\nUse a box.\n"}


def placeholder(name: str, row: Any, template: Any) -> dict[str, Any]:
    return {
        "dataset": f"nano_v3_sft_profiled_{name}",
        "_hf_placeholder": {"row": row, "question_template": template},
        "agent_ref": AGENT,
    }


CHOICE = {
    "id": 3,
    "responses_create_params": {"input": [{"role": "user", "content": "A or B?"}], "tools": []},
    "options": [{"A": "no"}, {"B": "yes"}],
    "expected_answer": "B",
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    "pass_rate": 0.4,
    "source": "science",
    "_hf_placeholder": None,
}


def prepared(folder: Path, rows: list[dict[str, Any]], **rest: Any) -> Manifest:
    sets = {"path": rows, "dapo": DAPO, "skywork": SKYWORK}
    paths = {name: str(write_rows(folder / f"{name}.jsonl", each)) for name, each in sets.items()}
    sources = {"nano": {"rows": {"type": "nemotron3_nano_rl", **paths, **rest}}}
    (folder / "blend.yaml").write_text(json.dumps({"sources": sources, "validation": 0.0, "max_dropped": 0.9}))
    return prepare(load(PrepConfig, folder / "blend.yaml").value, folder / "out", force=True)


def test_placeholders_get_their_questions_and_other_rows_lose_nothing(tmp_path: Path) -> None:
    rows = [
        placeholder("dapo17k", 4, TEMPLATE),
        placeholder("skywork_no_omni", 0, "Question: {question} Go."),
        CHOICE,
        placeholder("dapo17k", 4, TEMPLATE),
    ]
    tally = prepared(tmp_path, rows).sources["nano"]
    assert tally.dropped == {"duplicate": 1}
    assert {Path(file).name for file in tally.files} == {"path.jsonl", "dapo.jsonl", "skywork.jsonl"}
    dapo, skywork, choice = (json.loads(line) for line in (tmp_path / "out/train-00000.jsonl").open())
    question = "Solve it.\n\na\n\nb\n\n4?\n\nUse a box."
    assert dapo == {
        "dataset": "nano_v3_sft_profiled_dapo17k",
        "agent_ref": AGENT,
        "question": question,
        "expected_answer": "4",
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "source": "nano",
    }
    assert (skywork["question"], skywork["expected_answer"]) == ("Question: Root? Go.", "\\frac12")
    assert choice == {key: value for key, value in CHOICE.items() if value is not None}
    path = str(tmp_path / "out" / "train-*.jsonl")
    tasks = NemoGym(
        path=path, servers=dict.fromkeys(["math_with_judge", "mcqa"], "http://localhost"), test_size=1
    ).splits()
    assert sum(map(len, tasks.values())) == 3
    write_rows(tmp_path / "math.jsonl", [dapo, skywork])
    problems = Math(path=str(tmp_path / "math.jsonl"), test_size=0).tasks("train")
    assert [task.data.answer for task in problems] == ["4", "\\frac12"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (placeholder("dapo17k", 5, TEMPLATE), r"path\.jsonl:1: .*dapo\.jsonl \(dapo\) has 5 rows, .* the number 5"),
        (placeholder("dapo17k", 0, "no place"), "question_template' must be a text with {question}"),
        (placeholder("other", 0, TEMPLATE), "whose 'dataset' is one of: nano_v3_sft_profiled_dapo17k"),
        (
            {"responses_create_params": {"input": []}},
            "field 'responses_create_params' must be a list of messages that is not empty",
        ),
        ({"expected_answer": "7"}, "field 'responses_create_params' is missing"),
    ],
)
def test_a_row_that_is_wrong_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, [row])


def test_a_set_that_is_not_on_disk_says_what_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    dapo = "hf:BytedTsinghua-SIA/DAPO-Math-17k:train"
    with pytest.raises(ConfigError, match=f"dapo = {dapo}, to which rows of the blend refer: ") as caught:
        prepared(tmp_path, [placeholder("dapo17k", 0, TEMPLATE)], dapo=dapo)
    assert "hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir DIR" in str(caught.value)
