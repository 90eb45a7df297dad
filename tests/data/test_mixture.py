"""A mixture of rows: exact shares, exact resumes, no prompt in both splits, every part named where it is wrong."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.rows import pairs, write_rows
from tests.tiny import tiny_tokenizer
from tests.toy import read_settings
from whet.base.errors import ConfigError, DataError
from whet.chat.renderer import Renderer
from whet.config.issues import RecipeError
from whet.data.mixture import RowMixture
from whet.data.order import MixedOrder
from whet.data.source import DatasetSource
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run

RENDERER = Renderer(tiny_tokenizer())


def rows_file(path: Path, prompts: list[str], completion: str = "yes") -> str:
    path.write_text("".join(json.dumps({"prompt": each, "completion": completion}) + "\n" for each in prompts))
    return str(path)


def mixture(folder: Path, math_limit: int | None = None, chat_limit: int | None = None, **settings: Any) -> RowMixture:
    math = rows_file(folder / "math.jsonl", [f"math {number}" for number in range(30)])
    chat = rows_file(folder / "chat.jsonl", [f"chat {number}" for number in range(10)])
    of = {
        "math": {"rows": {"type": "supervised", "path": math, "max_tokens": math_limit}, "weight": 3},
        "chat": {"rows": {"type": "supervised", "path": chat, "max_tokens": chat_limit}},
    }
    return RowMixture.model_validate({"of": of, **settings})


def source(data: RowMixture, seed: int = 1) -> DatasetSource:
    train = data.groups(RENDERER)["train"]
    return DatasetSource(train, data.batch_size, order=data.order(train, seed))


def drawn(rows: DatasetSource, steps: int) -> list[list[str]]:
    async def run() -> list[list[str]]:
        batches = []
        for step in range(steps):
            groups = await rows.next_groups()
            batches.append([f"{Path(group.uid).name}" for group in groups])
            await rows.published(step + 1)
        return batches

    return asyncio.run(run())


def test_each_batch_has_the_shares_and_each_part_its_own_epochs(tmp_path: Path) -> None:
    rows = source(mixture(tmp_path, batch_size=4))
    batches = drawn(rows, 20)
    assert all(Counter(uid.split(".")[0] for uid in batch) == {"math": 3, "chat": 1} for batch in batches)
    uids = [uid for batch in batches for uid in batch]
    assert len(set(uids)) == 80
    metrics, _ = rows.tally()
    passes = {name: value for name, value in metrics.result().items() if name.endswith("epoch")}
    assert passes == pytest.approx({"data/epoch": 80 / 36, "data/math/epoch": 60 / 27, "data/chat/epoch": 20 / 9})


def test_a_resumed_mixture_continues_exactly(tmp_path: Path) -> None:
    data = mixture(tmp_path, batch_size=5)
    whole, first = drawn(source(data), 12), source(data)
    assert drawn(first, 5) == whole[:5]
    state = json.loads(json.dumps(first.state()))
    again = source(data)
    again.load_state(state)
    assert drawn(again, 7) == whole[5:]


def test_a_checkpoint_of_other_parts_is_refused() -> None:
    order = MixedOrder({"math": 3, "chat": 2}, {"math": 1, "chat": 1})
    with pytest.raises(ConfigError, match="kinds code, math of rows, but the recipe has chat, math"):
        order.load_state(MixedOrder({"math": 3, "code": 2}, {"math": 1, "code": 1}).state())
    with pytest.raises(ConfigError, match="made with 4 tasks or rows, now there are 2"):
        order.load_state(MixedOrder({"math": 3, "chat": 4}, {"math": 1, "chat": 1}).state())
    with pytest.raises(ConfigError, match="one kind of rows"):
        order.load_state({"epoch": 0, "cursor": 0, "count": 5})


def test_a_dropped_row_is_replaced_by_one_of_its_part() -> None:
    order = MixedOrder({"long": 4, "short": 4}, {"long": 1, "short": 1}, seed=3)
    kept = Counter[str]()
    for _ in range(40):
        index = order.next()
        while index in (0, 1, 2):  # too long
            order.dropped()
            index = order.next()
        kept["long" if index < 4 else "short"] += 1
    assert kept == {"long": 20, "short": 20}


def test_a_part_without_a_usable_row_is_an_error(tmp_path: Path) -> None:
    data = mixture(tmp_path, chat_limit=2)
    with pytest.raises(DataError, match="none of the 9 rows of chat can be used"):
        drawn(source(data), 5)


def test_no_prompt_is_in_both_splits_of_any_two_parts(tmp_path: Path) -> None:
    first = rows_file(tmp_path / "a.jsonl", [f"question {number}" for number in range(40)])
    second = rows_file(tmp_path / "b.jsonl", [f"question {number}" for number in range(20, 60)], "no")
    of = {name: {"rows": {"type": "supervised", "path": path}} for name, path in (("a", first), ("b", second))}
    groups = RowMixture.model_validate({"of": of}).groups(RENDERER)
    train, test = ({group.task.prompt[0]["content"] for group in groups[split]} for split in ("train", "test"))
    assert len(test) >= 4
    assert not train & test


def test_a_run_learns_from_a_mixture_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    data = mixture(tmp_path, batch_size=4)
    settings = {
        "steps": 2,
        "model": {"path": str(tiny_model)},
        "data": {"type": "mixture", **data.model_dump(mode="json", exclude_unset=True)},
        "algorithm": {"type": "sft"},
        "sinks": ["jsonl"],
    }
    for name, part in data.of.items():
        settings["data"]["of"][name]["rows"] = {"type": "supervised", "path": part.rows.path}
    folder = run.start(read_settings(settings), tmp_path / "run")
    run.resume(folder, ["steps=3"])
    last = next(line for line in read_metrics(folder / "metrics.jsonl") if line["step"] == 3 and "data/epoch" in line)
    evaluation = next(each for each in read_metrics(folder / "metrics.jsonl") if "evaluation/loss" in each)
    measured = {name: evaluation[f"evaluation/{name}/n"] for name in ("math", "chat")}
    assert measured == {"math": 3, "chat": 1}
    total = sum(count * evaluation[f"evaluation/{name}/loss"] for name, count in measured.items())
    assert total / 4 == pytest.approx(evaluation["evaluation/loss"], rel=0.02), "the rows are about equally long"
    assert last["data/math/epoch"] == pytest.approx(9 / 27)
    assert last["data/chat/epoch"] == pytest.approx(3 / 9)


def test_each_part_of_a_mixture_of_pairs_is_evaluated(tiny_model: Path, tmp_path: Path) -> None:
    files = {name: write_rows(tmp_path / f"{name}.jsonl", pairs(20, seed)) for seed, name in enumerate("ab")}
    parts = {name: {"rows": {"type": "preference", "path": str(path)}} for name, path in files.items()}
    parts["unmeasured"] = {"rows": {"type": "preference", "path": str(files["a"]), "test_size": 0}}
    settings = {
        "steps": 1,
        "model": {"path": str(tiny_model)},
        "data": {"type": "mixture", "of": parts, "batch_size": 4},
        "algorithm": {"type": "dpo", "reference": "cached"},
        "sinks": ["jsonl"],
    }
    folder = run.start(read_settings(settings), tmp_path / "run")
    values = [line for line in read_metrics(folder / "metrics.jsonl") if "evaluation/loss" in line][-1]
    assert {key.split("/")[1] for key in values if key.startswith("evaluation/") and key.count("/") == 2} == {"a", "b"}
    counts = [values[f"evaluation/{name}/n"] for name in "ab"]
    assert values["evaluation/n"] == sum(counts)
    for measure in ("accuracy", "margin", "loss"):
        each = [values[f"evaluation/{name}/{measure}"] for name in "ab"]
        mean = sum(count * value for count, value in zip(counts, each, strict=True)) / sum(counts)
        assert values[f"evaluation/{measure}"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"type": "dpo"}}, "data has a part of supervised, but DPO takes preference"),
        ({"part": {"batch_size": 4}}, "math.rows.batch_size is not read: data.batch_size sets the rows of a step"),
        ({"part": {"type": "mixture", "of": {}}}, "mixture"),
        ({"weight": 0}, "greater than 0"),
    ],
)
def test_a_wrong_mixture_is_refused(change: dict[str, Any], message: str) -> None:
    part = {"type": "supervised", "path": "rows.jsonl", **change.pop("part", {})}
    settings = {
        "steps": 1,
        "model": {"path": "model"},
        "data": {"type": "mixture", "of": {"math": {"rows": part, "weight": change.pop("weight", 1)}}},
        "algorithm": {"type": "sft"},
        **change,
    }
    with pytest.raises(RecipeError, match=message):
        read_settings(settings)


def test_the_longest_row_is_that_of_the_longest_part(tmp_path: Path) -> None:
    assert mixture(tmp_path).longest is None
    assert mixture(tmp_path, math_limit=100).longest is None
    assert mixture(tmp_path, math_limit=100, chat_limit=50).longest == 100
