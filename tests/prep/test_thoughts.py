"""Thoughts are removed or cut in their shares, by the seed; the questions and the answers stay."""

from pathlib import Path

import pytest

from tests.prep.test_prepare import config, read
from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.config import RecipeError
from whet.prep.config import Thoughts
from whet.prep.prepare import prepare
from whet.prep.thoughts import changes

RENDERER = Renderer(tiny_tokenizer())
THOUGHT = "one two three four five six seven eight"


def replies(count: int) -> list[dict]:
    return [
        {"messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\nanswer {number}"},
        ]}
        for number in range(count)
    ]  # fmt: skip


def test_shares_of_the_rows_lose_or_cut_their_thoughts() -> None:
    change = changes(Thoughts(removed=0.3, cut=0.2, budgets=(5,)), 0, RENDERER)
    done = {"thoughts removed": 0, "thoughts cut": 0, None: 0}
    for number, row in enumerate(replies(1000)):
        what = change(f"rows.jsonl:{number}", row)
        done[what] += 1
        reply = row["messages"][1]
        if what is None:
            assert reply == replies(number + 1)[number]["messages"][1]
            continue
        assert reply["content"] == f"answer {number}"
        cut = RENDERER.decode(RENDERER.encode_text(THOUGHT)[:5])
        assert reply.get("reasoning_content") == (cut if what == "thoughts cut" else None)
    assert done["thoughts removed"] == pytest.approx(300, abs=50)
    assert done["thoughts cut"] == pytest.approx(200, abs=45)


def test_the_choice_follows_from_the_seed_and_the_place() -> None:
    def chosen(seed: int) -> list[str | None]:
        change = changes(Thoughts(removed=0.5), seed, None)
        return [change(f"rows.jsonl:{number}", row) for number, row in enumerate(replies(50))]

    assert chosen(1) == chosen(1) != chosen(2)


def test_rows_without_thoughts_and_thoughts_within_the_budget_are_kept() -> None:
    everything = changes(Thoughts(removed=1), 0, None)
    plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert everything("rows.jsonl:1", plain) is None
    long = changes(Thoughts(cut=1, budgets=(10_000,)), 0, RENDERER)
    assert long("rows.jsonl:1", replies(1)[0]) is None


def test_pairs_and_fields_apart_are_changed_too() -> None:
    said = {"role": "assistant", "content": "yes", "reasoning_content": THOUGHT}
    pair = {"prompt": [{"role": "user", "content": "q"}], "chosen": [said], "rejected": [{**said, "content": "no"}]}
    before = pair["chosen"]
    assert changes(Thoughts(removed=1), 0, None)("rows.jsonl:1", pair) == "thoughts removed"
    assert pair["chosen"] == [{"role": "assistant", "content": "yes"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "no"}]
    assert before == [said]


def test_prep_counts_changed_rows(tiny_model: Path, tmp_path: Path) -> None:
    thoughts = {"removed": 0.5, "cut": 0.5, "budgets": [4]}
    settings = config(tmp_path, {"a": replies(40)}, model={"path": str(tiny_model)}, thoughts=thoughts)
    manifest = prepare(settings, tmp_path / "out")
    changed = manifest.sources["a"].changed
    assert sum(changed.values()) == 40
    assert len(changed) == 2
    rows = [row for split in ("train", "validation") for row in read(tmp_path / "out", split)]
    assert sum("reasoning_content" in row["messages"][1] for row in rows) == changed["thoughts cut"]
    assert {row["messages"][1]["content"] for row in rows} == {f"answer {number}" for number in range(40)}


def test_rows_outside_of_a_range_are_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": "a", "pass_rate": n / 10} for n in range(11)]
    manifest = prepare(config(tmp_path, {"a": rows}, a={"where": {"pass_rate": [0.1, 0.9]}}), tmp_path / "out")
    assert manifest.sources["a"].dropped == {"pass_rate outside 0.1 to 0.9": 2}
    assert manifest.sources["a"].kept == 9
    del rows[3]["pass_rate"]
    with pytest.raises(DataError, match=r"a.jsonl:4: field 'pass_rate' is missing, and where.pass_rate needs a number"):
        prepare(config(tmp_path, {"a": rows}, a={"where": {"pass_rate": [0.1, 0.9]}}, max_dropped=0), tmp_path / "out2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thoughts": {"cut": 0.1}}, "thoughts.budgets are in tokens: set model"),
        ({"thoughts": {"removed": 0.6, "cut": 0.6}}, "together more than 1"),
        ({"thoughts": {"budgets": []}}, "at least 1"),
        ({"a": {"where": {"score": [2, 1]}}}, "sources.a.where.score: 2 is more than 1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        config(tmp_path, {"a": replies(3)}, **settings)
