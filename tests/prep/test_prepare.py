"""Sources of rows become shards with a manifest: every row is accounted for, and a kill loses nothing."""

import asyncio
import json
import shlex
import unicodedata
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.forks import whet
from tests.rows import write_rows
from whet.base.errors import DataError
from whet.cli import prep
from whet.config import RecipeError, load
from whet.data.row import read_rows
from whet.data.row_kinds import Conversation
from whet.data.rows import ScoredRows, question_key
from whet.prep import prepare as module
from whet.prep import shards
from whet.prep.config import PrepConfig
from whet.prep.contamination import Contamination
from whet.prep.duplicates import Keys, key_of, seen_before
from whet.prep.manifest import FILE, Manifest
from whet.prep.prepare import prepare
from whet.run.recipe import Recipe
from whet.tasks.functions import FunctionTasks
from whet.tasks.splits import question_key as question_key_of_tasks

Rows = list[dict[str, Any]]


def texts(first: int, count: int) -> Rows:
    return [
        {"prompt": f"What comes after {i}?", "completion": f"After {i} comes {i + 1}."}
        for i in range(first, first + count)
    ]


def config(folder: Path, sources: dict[str, Rows], **settings: Any) -> PrepConfig:
    """Return the settings for sources that are written as files."""
    kinds = {"chosen": "preference", "score": "scored"}
    written = {}
    for name, rows in sources.items():
        path = write_rows(folder / f"{name}.jsonl", rows)
        kind = next((kinds[field] for field in rows[0] if field in kinds), "supervised")
        written[name] = {"rows": {"type": kind, "path": str(path)}} | settings.get(name, {})
    given = {key: value for key, value in settings.items() if key not in sources}
    recipe = folder / "blend.yaml"
    recipe.write_text(json.dumps({"sources": written} | given))
    return load(PrepConfig, recipe).value


def read(folder: Path, split: str) -> Rows:
    return [
        json.loads(line) for file in sorted(folder.glob(f"{split}-*.jsonl")) for line in file.read_text().splitlines()
    ]


def test_every_row_is_in_one_split_or_dropped_for_a_reason(tmp_path: Path) -> None:
    rows = [*texts(0, 60), *texts(0, 3), {"prompt": "no answer"}]
    settings = config(tmp_path, {"a": rows, "b": texts(58, 40)}, validation=0.2, test=0.1, shard_rows=20)
    manifest = prepare(settings, tmp_path / "out")
    assert manifest.sources["a"].dropped == {"wrong": 1, "duplicate": 3}
    assert manifest.sources["b"].dropped == {"duplicate": 2}
    assert "a.jsonl:64: field 'completion' is missing" in manifest.sources["a"].examples["wrong"]
    splits = {split: read(tmp_path / "out", split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == 98 == sum(manifest.rows(split) for split in splits)
    asked = {split: {row["messages"][0]["content"] for row in rows} for split, rows in splits.items()}
    assert not asked["train"] & asked["validation"] | asked["train"] & asked["test"]
    assert 8 <= len(splits["validation"]) <= 32
    assert {row["source"] for row in splits["train"]} == {"a", "b"}
    files = manifest.splits["train"]
    assert list(files)[:2] == ["train-00000.jsonl", "train-00001.jsonl"]
    assert files["train-00000.jsonl"]["rows"] == 20
    assert not (tmp_path / "out" / ".stage").exists()


def test_what_is_up_to_date_is_not_written_again(tmp_path: Path) -> None:
    settings, out = config(tmp_path, {"a": texts(0, 9)}), tmp_path / "out"
    first = prepare(settings, out)
    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(settings, out) == first
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == written
    with pytest.raises(DataError, match=r"was prepared otherwise .*a\.jsonl has changed.*; replace it with --force"):
        prepare(config(tmp_path, {"a": texts(0, 8)}), out)
    assert prepare(config(tmp_path, {"a": texts(0, 8)}), out, force=True).sources["a"].read == 8
    (out / "train-00000.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"train-00000.jsonl was changed: its SHA-256"):
        prepare(config(tmp_path, {"a": texts(0, 8)}), out)
    (out / "train-00000.jsonl").unlink()
    with pytest.raises(DataError, match=r"train-00000.jsonl is missing"):
        prepare(config(tmp_path, {"a": texts(0, 8)}), out)
    manifest = (out / FILE).read_text()
    (out / FILE).write_text(manifest.replace('"read": 8', '"read": "8"'))
    with pytest.raises(DataError, match=r"manifest.json is damaged .sources.a.read: expected a whole number, got text"):
        prepare(settings, out)
    (out / FILE).write_text("{")
    with pytest.raises(DataError, match=r"manifest.json is damaged .*; choose another --out, or replace it with --f"):
        prepare(settings, out)
    prepare(settings, out, force=True)
    assert prepare(settings, out).sources["a"].read == 8


def test_data_that_were_prepared_otherwise_are_refused_with_the_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(config(tmp_path, {"a": texts(0, 9)}), out)
    with pytest.raises(DataError, match=r"otherwise \(validation was 0\.02 and is 0\.2\); replace it with --force"):
        prepare(config(tmp_path, {"a": texts(0, 9)}, validation=0.2), out)
    with pytest.raises(DataError, match=r"otherwise \(.*a\.jsonl has changed\); replace"):
        prepare(config(tmp_path, {"a": texts(0, 10)}), out)
    with pytest.raises(DataError, match=r"otherwise \(sources\.b\S* was absent and is .*\); replace"):
        prepare(config(tmp_path, {"a": texts(0, 9), "b": texts(9, 9)}), out)
    with pytest.raises(DataError, match=r"blend\.yaml is a file; --out names the folder to write"):
        prepare(config(tmp_path, {"a": texts(0, 9)}), tmp_path / "blend.yaml")


@pytest.mark.parametrize("text", ['{"name": "my extension", "version": "2"}', '[{"file": "a.txt"}]'])
def test_a_manifest_of_another_program_is_never_replaced(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / FILE).write_text(text)
    for force in (False, True):
        with pytest.raises(DataError, match=r"manifest\.json was not written by `whet prep`.*; choose another --out"):
            prepare(config(tmp_path, {"a": texts(0, 9)}), out, force=force)
    assert (out / FILE).read_text() == text


def test_a_folder_of_other_files_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("dear")
    (out / "notes-2026.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"is not empty and has no manifest\.json"):
        prepare(config(tmp_path, {"a": texts(0, 9)}), out)
    prepare(config(tmp_path, {"a": texts(0, 9)}), out, force=True)
    assert (out / "thesis.tex").read_text() == "dear"
    assert (out / "notes-2026.jsonl").read_text() == "{}"


def test_a_source_is_never_replaced_by_what_is_made_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(config(tmp_path, {"a": texts(0, 9)}), out)
    before = (out / "train-00000.jsonl").read_bytes()
    rows = {"type": "supervised", "path": str(out / "train-*.jsonl")}
    again = config(tmp_path, {"a": texts(0, 9)}, a={"rows": rows})
    with pytest.raises(DataError, match=r"train-00000\.jsonl is read, and would be replaced by data in .*out; choose"):
        prepare(again, out, force=True)
    assert (out / "train-00000.jsonl").read_bytes() == before
    prepare(again, tmp_path / "other")


def test_a_killed_preparation_continues_with_the_source_that_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = config(tmp_path, {"a": texts(0, 9), "b": texts(20, 9)}), tmp_path / "out"
    whole = prepare(settings, tmp_path / "whole")
    read_rows, reads = module.placed_rows, list[str]()

    def killed(path: str, *rest: Any, **named: Any) -> Any:
        reads.append(Path(path).stem)
        if reads == ["a", "b"]:
            raise KeyboardInterrupt
        return read_rows(path, *rest, **named)

    monkeypatch.setattr(module, "placed_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, out)
    assert not (out / FILE).exists()
    assert prepare(settings, out) == whole
    assert reads == ["a", "b", "b"]
    assert read(out, "train") == read(tmp_path / "whole", "train")


def test_a_call_that_fails_while_it_merges_publishes_no_part_of_a_shard_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = config(tmp_path, {"a": texts(0, 9)}, validation=0.0, shard_rows=4), tmp_path / "out"
    copies, merged = shards._copies, list[str]()

    def failing(*row: Any) -> int:
        merged.append(row[-1])
        if len(merged) == 7:
            raise DataError("no room")
        return copies(*row)

    monkeypatch.setattr(shards, "_copies", failing)
    with pytest.raises(DataError, match="no room"):
        prepare(settings, out)
    assert [path.name for path in out.glob("*.jsonl")] == ["train-00000.jsonl"], "the shard that is complete"
    (out / f".train-00001.jsonl.{2**22 + 1}-0a1b2c3d").touch()  # of a process that was killed
    assert prepare(settings, out).rows("train") == 9
    assert len(read(out, "train")) == 9


def test_shares_copy_and_choose_rows_by_the_seed(tmp_path: Path) -> None:
    sources = {"a": texts(0, 100), "b": texts(200, 100)}
    settings = config(tmp_path, sources, a={"share": 0.25}, b={"share": 2.5}, validation=0.0)
    manifest = prepare(settings, tmp_path / "out")
    a, b = manifest.sources["a"], manifest.sources["b"]
    assert a.kept + a.dropped["not in the share"] == 100
    assert 15 <= a.kept <= 35
    assert 135 <= b.copies <= 165
    assert manifest.rows("train") == a.kept + b.kept + b.copies
    other = prepare(settings.model_copy(update={"seed": 1}), tmp_path / "other")
    assert read(tmp_path / "other", "train") != read(tmp_path / "out", "train")
    assert other.sources["b"].read == 100


def test_a_row_that_one_source_leaves_out_of_its_share_is_no_duplicate_in_another(tmp_path: Path) -> None:
    sources = {"a": [*texts(0, 40), *texts(0, 40)], "b": texts(0, 40)}
    manifest = prepare(config(tmp_path, sources, a={"share": 0.5}, validation=0.0), tmp_path / "out")
    assert sorted(row["messages"][0]["content"] for row in read(tmp_path / "out", "train")) == sorted(
        row["prompt"] for row in texts(0, 40)
    )
    a, b = manifest.sources["a"], manifest.sources["b"]
    assert a.dropped["not in the share"] == 2 * b.kept, "equal rows of a source have the same fate"
    assert a.dropped["duplicate"] == b.dropped["duplicate"] == a.kept


@pytest.mark.parametrize("setting", [{"test_path": "x.jsonl"}, {"test_size": 3}, {"batch_size": 4}])
def test_settings_of_rows_that_no_preparation_reads_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    rows = {"type": "supervised", "path": str(write_rows(tmp_path / "a.jsonl", texts(0, 9)))} | setting
    with pytest.raises(RecipeError, match=rf"sources\.a\.rows\.{next(iter(setting))} is not read: whet prep divides"):
        config(tmp_path, {"a": texts(0, 9)}, a={"rows": rows})


def test_pairs_and_scores_keep_their_fields(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(5)]
    prepare(config(tmp_path, {"a": pairs}, validation=0.0), tmp_path / "pairs")
    user, good = {"role": "user", "content": "q0"}, {"role": "assistant", "content": "good"}
    bad = {"role": "assistant", "content": "bad"}
    assert read(tmp_path / "pairs", "train")[0] == {
        "prompt": [user],
        "chosen": [good],
        "rejected": [bad],
        "source": "a",
    }
    prepare(config(tmp_path, {"a": [{**row, "score": 1.5} for row in texts(0, 3)]}, validation=0.0), tmp_path / "s")
    assert read(tmp_path / "s", "train")[0]["score"] == 1.5
    with pytest.raises(RecipeError, match=r"rows of several kinds, .*a: prompt, chosen, rejected; b: messages"):
        config(tmp_path, {"a": pairs, "b": texts(0, 3)})


def test_other_columns_are_kept_and_counted_and_rewards_and_rows_find_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "id": i, "level": {"hard": i % 2 == 0}} for i, row in enumerate(texts(0, 20))]
    rows += [{**rows[0], "id": 99}]  # a duplicate: other columns are not compared
    rows[1]["source"], rows[2]["note"] = "a book", "half of a pair: \ud800"
    manifest = prepare(config(tmp_path, {"a": rows}, validation=0.0), tmp_path / "out")
    tally = manifest.sources["a"]
    assert (tally.kept, tally.dropped) == (20, {"duplicate": 1})
    assert tally.columns == {"id": 21, "level": 21, "source": 1}
    assert tally.left_out == {"note": 1}, "no file in UTF-8 can hold it"
    written = read(tmp_path / "out", "train")
    assert list(written[0]) == ["messages", "id", "level", "source"]
    assert [row["source"] for row in written[:3]] == ["a", "a book", "a"]
    path = f"{tmp_path}/out/train-*.jsonl"
    assert [row.model_extra for row in read_rows(path, Conversation)][2] == {
        "id": 2,
        "level": {"hard": True},
        "source": "a",
    }
    reward = "tests.prep.test_prepare:by_level"
    task = next(
        task for task in FunctionTasks(path=path, reward=reward, test_size=2).tasks("train") if task.columns["id"] == 4
    )
    assert asyncio.run(FunctionTasks(path=path, reward=reward).grade(task, "?")) == 5
    fewer = config(tmp_path, {"a": rows}, a={"keep_columns": ["id", "levle"]}, validation=0.0)
    assert prepare(fewer, tmp_path / "fewer").sources["a"].left_out == {"level": 21, "source": 1, "note": 1}
    assert set(read(tmp_path / "fewer", "train")[1]) == {"messages", "id", "source"}
    assert "sources.a.keep_columns: no row has the column 'levle'. Did you mean 'level'?" in caplog.text


def test_columns_of_bytes_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture = BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    voice = {"bytes": b"RIFF", "path": "a.wav"}
    tables = {
        "sounds": [{**row, "sound": b"RIFF", "voice": voice} for row in texts(0, 9)],
        "seen": [{**row, "image": picture.getvalue()} for row in texts(20, 9)],
    }
    given: dict[str, Any] = {}
    for name, rows in tables.items():
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        given[name] = {"rows": {"type": "supervised", "path": f"{tmp_path}/{name}.parquet"}}
    given["sounds"]["keep_columns"] = ["sound", "voice"]
    manifest = prepare(config(tmp_path, dict.fromkeys(tables, texts(0, 1)), validation=0.0, **given), tmp_path / "out")
    assert manifest.sources["sounds"].left_out == {"sound": 9}
    assert manifest.sources["sounds"].columns == {"voice": 9}
    assert manifest.sources["seen"].left_out == {}, "the image is in the messages"
    assert read(tmp_path / "out", "train")[0]["voice"] == {"path": "a.wav"}
    assert "sources.sounds.keep_columns: the column 'sound' is left out, because JSON can't hold" in caplog.text


def by_level(answer: str, id: int, level: dict[str, bool]) -> float:
    return id + level["hard"]


def test_too_many_wrong_rows_stop_a_source(tmp_path: Path) -> None:
    settings = config(tmp_path, {"a": [*texts(0, 6), *({"prompt": "?"} for _ in range(4))]})
    with pytest.raises(DataError, match=r"a: 4 of the first 10 rows are wrong, more than max_dropped = 0\.1 allows"):
        prepare(settings, tmp_path / "out")
    assert prepare(settings.model_copy(update={"max_dropped": 0.4}), tmp_path / "out").sources["a"].kept == 6


def test_lengths_are_those_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    rows = [*texts(0, 5), {"prompt": "long", "completion": "word " * 300}]
    limits = {"rows": {"type": "supervised", "path": str(tmp_path / "a.jsonl"), "max_tokens": 200}}
    settings = config(tmp_path, {"a": rows}, a=limits, model={"path": str(tiny_model)})
    assert prepare(settings, tmp_path / "out").sources["a"].dropped == {"longer than 200 tokens": 1}
    with pytest.raises(RecipeError, match=r"sources.a.rows.max_tokens needs a tokenizer: set model"):
        config(tmp_path, {"a": rows}, a=limits)


def test_evaluation_texts_are_dropped(tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(30))
    held = write_rows(
        tmp_path / "held.jsonl", [{"question": words, "answer": "12"}, {"question": "How many legs has a cat?"}]
    )
    rows = [
        {"prompt": "Read: " + " ".join(words.split()[5:18]), "completion": "ok"},  # 13 words in a row
        {"prompt": "Read: " + " ".join(words.split()[5:17]), "completion": "12"},
        {"prompt": "how many legs HAS a cat", "completion": "four"},
        {"prompt": "How many legs has a dog?", "completion": "four"},
    ]
    settings = config(tmp_path, {"a": rows}, decontamination={"against": [str(held)]}, validation=0.0)
    assert prepare(settings, tmp_path / "out").sources["a"].dropped == {"text of an evaluation set": 2}
    assert [row["messages"][1]["content"] for row in read(tmp_path / "out", "train")] == ["12", "four"]
    assert not Contamination(13).found_in([words])


def test_rows_that_differ_in_case_spacing_and_notation_are_equal(tmp_path: Path) -> None:
    def talk(question: object, answer: str, **more: object) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question, **more}, {"role": "assistant", "content": answer}]}

    turned = [dict(reversed(message.items())) for message in talk("Which way?", "To the left.")["messages"]]
    same = [
        talk("Which way?", "To the left."),
        {"messages": turned},
        talk(" Which\nway?", "to the LEFT. "),
        talk("Which way?", "To the left.", name=None),
        talk([{"type": "text", "text": "Which "}, {"type": "text", "text": "way?"}], "To the left."),
    ]
    rows = [*same, talk("Which way?", "To the right."), talk("Which way?", "To the left.", name="Ann")]
    tallies = prepare(config(tmp_path, {"a": rows}, validation=0.0), tmp_path / "all").sources
    assert tallies["a"].dropped == {"duplicate": 4}
    questions = config(tmp_path, {"a": rows}, duplicates="drop_questions", validation=0.0)
    assert prepare(questions, tmp_path / "questions").sources["a"].dropped == {"duplicate": 5}


def test_accents_are_compared_in_the_same_way_however_they_are_written(tmp_path: Path) -> None:
    question = "Où est le café de Zoé près de l'hôtel"
    composed, decomposed = (unicodedata.normalize(form, question) for form in ("NFC", "NFD"))
    assert composed != decomposed
    rows = [{"prompt": text, "completion": "Là."} for text in (composed, decomposed)]
    settings = config(tmp_path, {"a": rows}, validation=0.0)
    assert prepare(settings, tmp_path / "equal").sources["a"].dropped == {"duplicate": 1}
    seen = seen_before("drop_near", 0.8, 2)
    assert [seen("", "", lambda text=text: text) for text in (composed, decomposed)] == [False, True]
    held = write_rows(tmp_path / "held.jsonl", [{"question": decomposed}])
    other = {"prompt": "2 + 2?", "completion": "4"}
    settings = config(tmp_path, {"a": [rows[0], other]}, decontamination={"against": [str(held)]}, validation=0.0)
    assert prepare(settings, tmp_path / "held").sources["a"].dropped == {"text of an evaluation set": 1}
    read_again = list(read_rows(str(write_rows(tmp_path / "rows.jsonl", rows)), Conversation))
    assert len(set(map(question_key, read_again))) == 1, "for the split of rows, too"
    assert question_key_of_tasks(composed) == question_key_of_tasks(decomposed)


def test_equal_rows_are_duplicates_whatever_happens_to_their_thoughts(tmp_path: Path) -> None:
    rows = [{"prompt": "2 + 2?", "completion": "<think>Two and two.</think>4"}] * 40
    settings = config(tmp_path, {"a": rows}, thoughts={"removed": 0.5}, validation=0.0)
    assert prepare(settings, tmp_path / "out").sources["a"].dropped == {"duplicate": 39}


def test_each_chinese_character_is_a_word(tmp_path: Path) -> None:
    question = "小明有三个苹果吃了一个还剩几个"
    held = write_rows(tmp_path / "held.jsonl", [{"question": question}])
    rows = [{"prompt": f"请回答{question}谢谢", "completion": "二"}, {"prompt": "小明有几个苹果", "completion": "三"}]
    settings = config(tmp_path, {"a": rows}, decontamination={"against": [str(held)]}, validation=0.0)
    assert prepare(settings, tmp_path / "out").sources["a"].dropped == {"text of an evaluation set": 1}
    seen = seen_before("drop_near", 0.8, 3)
    texts = [question * 4, question * 4 + "吗", "三" * 60]
    assert [seen("", "", lambda text=text: text) for text in texts] == [False, True, False]


def test_near_duplicates_are_dropped() -> None:
    words = [f"w{i}" for i in range(60)]
    text, near, far = " ".join(words), " ".join([*words[:59], "other"]), " ".join(reversed(words))
    for how, expected in (("drop", [False, False, False]), ("drop_near", [False, True, False])):
        seen = seen_before(how, 0.8, 4)
        assert [seen(key_of("q"), key_of(each), lambda each=each: each) for each in (text, near, far)] == expected
        assert seen(key_of("other"), key_of(text.upper() + " "), lambda: text.upper() + " ")
    questions = seen_before("drop_questions", 0.8, 3)
    asked = [("q", text), ("Q ", far), ("r", text)]
    assert [questions(key_of(q), key_of(each), str) for q, each in asked] == [False, True, False]


def test_a_table_of_keys_is_a_set_in_one_block() -> None:
    keys, own = Keys(1000), [bytes.fromhex(key_of(str(i))) for i in range(1000)]
    assert not any(map(keys.add, own))
    assert all(map(keys.add, own))
    assert own[7] in keys
    assert bytes.fromhex(key_of("another")) not in keys


def test_rows_of_prompts_keep_their_columns(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"question": f"What is {i} + 1?", "solution": str(i + 1), "id": i, "tools": "none"} for i in range(30)]
    rows[3]["source"] = "a book"
    wrong = [{"question": " ", "solution": "1"}, {"question": "What?"}, {**rows[0], "id": 99}]
    (tmp_path / "held.jsonl").write_text('{"text": "the identifier of the row"}')
    noted = [row | {"note": "the identifier of the row"} for row in rows]
    path = write_rows(tmp_path / "a.jsonl", [*noted, *wrong, {"question": "long " * 300, "solution": "1"}])
    path.write_text(path.read_text() + "{broken\n")
    columns = {"prompt": "question", "answer": "solution"}
    source = {"rows": {"type": "prompts", "path": str(path), "columns": columns, "max_tokens": 200}}
    blend = {"sources": {"a": source}, "model": {"path": str(tiny_model)}, "max_dropped": 0.2, "validation": 0.2}
    against = {"decontamination": {"against": [str(tmp_path / "held.jsonl")]}}
    (tmp_path / "blend.yaml").write_text(json.dumps(blend | against))
    tally = prepare(load(PrepConfig, tmp_path / "blend.yaml").value, tmp_path / "out").sources["a"]
    assert (tally.read, tally.kept) == (35, 30)
    assert tally.dropped == {"wrong": 3, "longer than 200 tokens": 1, "duplicate": 1}
    kept = read(tmp_path / "out", "train") + read(tmp_path / "out", "validation")
    first = {
        "prompt": "What is 0 + 1?",
        "answer": "1",
        "id": 0,
        "tools": "none",
        "note": noted[0]["note"],
        "source": "a",
    }
    assert first in kept
    assert [row["source"] for row in kept if row["id"] == 3] == ["a book"]
    (tmp_path / "blend.yaml").write_text(json.dumps(blend | {"thoughts": {"removed": 0.5}}))
    with pytest.raises(RecipeError, match=r"rows of prompts have none: leave thoughts out"):
        load(PrepConfig, tmp_path / "blend.yaml")
    source["rows"]["columns"]["answer"] = "result"
    (tmp_path / "blend.yaml").write_text(json.dumps(blend))
    with pytest.raises(DataError, match=r"the row has no 'result' \(columns.answer\); it has question, solution"):
        prepare(load(PrepConfig, tmp_path / "blend.yaml").value, tmp_path / "other")


def test_a_file_of_damaged_lines_alone_is_named_by_its_first_line(tmp_path: Path) -> None:
    settings = config(tmp_path, {"a": texts(0, 3)})
    (tmp_path / "a.jsonl").write_text("{bad\n{worse\n")
    with pytest.raises(DataError, match=r"2 of the first 2 rows are wrong, .*a\.jsonl:1: not valid JSON"):
        prepare(settings, tmp_path / "out")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"a\.jsonl holds no rows"):
        prepare(settings, tmp_path / "out")


def right(text: str, answer: str) -> bool:
    return answer in text


def test_prepared_prompts_are_tasks(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(40)])
    path.write_text(path.read_text() + "{broken\n")
    given = {"reward": f"{__name__}:right", "test_size": 4}
    with pytest.raises(
        DataError, match=r"a\.jsonl:41: not valid JSON: .*; `whet prep` leaves out and counts wrong rows"
    ):
        FunctionTasks(path=str(path), **given).tasks("train")
    source = {"rows": {"type": "prompts", "path": str(path), "needs": ["answer"]}}
    (tmp_path / "blend.yaml").write_text(json.dumps({"sources": {"a": source}, "validation": 0.2}))
    done = whet("prep", str(tmp_path / "blend.yaml"), "--out", str(tmp_path / "out"))
    assert "a.jsonl:41: not valid JSON" in done.stdout
    assert f"whet train grpo data.path='{tmp_path}/out/train-*.jsonl'" in done.stdout
    tasks = FunctionTasks(path=f"{tmp_path}/out/train-*.jsonl", test_path=f"{tmp_path}/out/validation-*.jsonl", **given)
    assert len(tasks.tasks("train")) >= 20
    assert len(tasks.tasks("test")) == 4
    task = tasks.tasks("train")[0]
    assert asyncio.run(tasks.grade(task, f"It is {task.data['answer']}.")) is True


def test_the_command(tmp_path: Path) -> None:
    config(tmp_path, {"a": texts(0, 50)})
    blend, out = str(tmp_path / "blend.yaml"), tmp_path / "out"
    dry = whet("prep", blend, "--out", str(out), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not out.exists()
    done = whet("prep", blend, "--out", str(out), "--sample", "40", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sources"]["a"]["read"] == 40
    assert (manifest := Manifest.read(out)) is not None
    assert manifest.problems(out) == []
    again = whet("prep", blend, "--out", str(out))
    assert again.returncode == 1
    assert "(other files, or another --sample); replace it with --force" in again.stderr
    few = whet("prep", blend, "--out", str(tmp_path / "few"), "--sample", "1", "validation=0.0001")
    assert "warning: validation has no rows: validation = 0.0001 of 1 rows is too little" in few.stdout
    forced = whet("prep", blend, "--out", str(out), "--force")
    assert f"train on it: whet train sft data.path='{out}/train-*.jsonl'" in forced.stdout


def test_the_command_names_a_recipe_that_reads_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, {"a": [{**row, "score": 0.5} for row in texts(0, 50)]})
    prep.prep(tmp_path / "blend.yaml", out=tmp_path / "out")
    (advice,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train on it")]
    assert advice.startswith(f"train on it: whet train reward-model data.path='{tmp_path}/out/train-*.jsonl'")
    words = shlex.split(advice.removeprefix("train on it: whet train "))
    recipe = load(Recipe, words[0], [*words[1:], "model=smollm2-135m-instruct"]).value
    assert isinstance(recipe.data, ScoredRows)


def test_a_source_without_a_path_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text("sources: {a: {rows: {type: supervised}}}")
    with pytest.raises(RecipeError, match=r"sources\.a\.rows\.path: is missing; expected text \(A file") as caught:
        load(PrepConfig, tmp_path / "blend.yaml")
    assert len(caught.value.issues) == 1
