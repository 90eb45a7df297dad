"""Each run records what it read, with digests and the history of what made it."""

import json
import shutil
from pathlib import Path

import pytest

import whet as whet_api
from tests.forks import whet
from tests.rows import write_rows
from tests.toy import read_settings, toy_recipe, toy_settings, write_settings
from whet.base import digests
from whet.base.digests import digest, sha256, unchanged
from whet.base.errors import DataError
from whet.config import dump_yaml, load
from whet.lineage.exports import of_answers
from whet.lineage.reading import inputs_of, record_run
from whet.lineage.record import FILE, Record, maker_of, read_record
from whet.models.config import ModelConfig
from whet.run import run
from whet.run.recipe import Recipe


def test_a_digest_says_what_it_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(10_000))
    assert digest(path) == digest(path, whole=False) == f"sha256:{sha256(path)}"
    monkeypatch.setattr(digests, "_WHOLE", 5_000)
    monkeypatch.setattr(digests, "_STRIDE", 1_000)
    monkeypatch.setattr(digests, "_BLOCK", 100)
    blocks = digest(path, whole=False)
    assert blocks.startswith("blocks:")
    for size, changed_at, same in ((10_000, 3_050, False), (10_000, 3_500, True), (10_001, 0, False)):
        content = bytearray(size)
        content[changed_at] = 1
        path.write_bytes(content if changed_at else bytes(size))
        assert unchanged(path, blocks) == same


def test_a_run_records_its_model_its_data_and_the_users_code(tiny_model: Path, tmp_path: Path) -> None:
    settings = toy_settings(tiny_model, steps=1, evaluation={"enabled": False})
    recipe = write_settings(tmp_path / "toy.yaml", settings)
    done = whet("train", str(recipe), "--folder", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run")
    assert record is not None
    assert record.kind == "run"
    assert record.recipe == digest(tmp_path / "run" / "recipe.yaml")
    assert record.sessions[0].command.endswith(f"train {recipe} --folder {tmp_path / 'run'}")
    assert {"whet", "torch", "transformers", "python"} <= record.sessions[0].versions.keys()
    inputs = {each.setting: each for each in record.inputs}
    assert inputs["data"].name == "tests.toy:Lowercase"
    weights = tiny_model / "model.safetensors"
    assert inputs["model"].files[str(weights)] == digest(weights)
    assert record.problems() == []


def test_a_resumed_run_keeps_what_it_read_and_names_what_was_changed(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "completion": "yes"} for i in range(20)])
    data = {"type": "supervised", "path": str(rows), "batch_size": 2}
    run = tmp_path / "run"
    recipe = json.dumps({"steps": 1, "algorithm": "sft", "model": str(tiny_model), "data": data, "sinks": ["jsonl"]})
    (tmp_path / "sft.yaml").write_text(recipe)
    assert whet("train", str(tmp_path / "sft.yaml"), "--folder", str(run)).returncode == 0
    rows.write_text(rows.read_text().replace("yes", "no"))
    resumed = whet("resume", str(run), "steps=2")
    assert resumed.returncode == 0, resumed.stderr
    assert f"data.path: {rows} was changed since the run read it" in resumed.stderr
    record = read_record(run)
    assert record is not None
    assert len(record.sessions) == 2
    assert record.replaced(record.inputs) == []
    moved, other = (shutil.copytree(tiny_model, tmp_path / name) for name in ("moved", "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    recipe = load(Recipe, run / "recipe.yaml").value
    for path, changed in ((moved, False), (other, True)):
        inputs = inputs_of(recipe.model_copy(update={"model": ModelConfig(path=str(path))}), run)
        expected = f"model: the run read {tiny_model} so far, and continues with {path}, which is not the same"
        assert record.replaced(inputs) == [expected] * changed
    revised = [each.model_copy(update={"name": str(tiny_model), "revision": "1f"}) for each in inputs]
    expected = f"model: the run read {tiny_model} so far, and continues with {tiny_model} (1f), which is not the same"
    assert record.replaced(revised) == [expected]
    caplog.clear()
    record_run(recipe, run, recipe.seed + 1, again=True)
    assert "seed: the run began with 0, and continues with 1" in caplog.text
    versions = [each.files[str(rows)] for each in record.inputs if each.setting == "data.path"]
    assert versions[0] != versions[1] == digest(rows)


def test_prepared_data_are_recorded_with_their_sources(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = write_rows(tmp_path / "raw.jsonl", [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(30)])
    source = {"rows": {"type": "supervised", "path": "raw.jsonl"}, "licence": "MIT"}
    (tmp_path / "blend.yaml").write_text(json.dumps({"sources": {"counting": source}}))
    assert whet("prep", "blend.yaml", "--out", "prepared").returncode == 0
    data = {"type": "supervised", "path": str(tmp_path / "prepared" / "train-*.jsonl")}
    recipe = read_settings({"steps": 1, "algorithm": "sft", "model": str(tiny_model), "data": data})
    found = {each.setting: each for each in inputs_of(recipe, tmp_path / "run")}["data.path"]
    assert found.maker is not None
    assert found.maker.kind == "prep"
    assert found.maker.inputs[0].licence == "MIT"
    assert found.maker.inputs[0].files == {str(raw): digest(raw)}
    assert found.maker.problems() == []
    raw.unlink()
    shard = tmp_path / "prepared" / "train-00000.jsonl"
    shard.write_text(shard.read_text() + "\n")
    assert found.maker.problems() == [
        f"counting: {raw} is missing",
        f"{shard} was changed since the prep wrote it",
    ]


def test_a_run_on_prepared_data_that_were_changed_says_so(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = write_rows(tmp_path / "raw.jsonl", [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(30)])
    blend = {"sources": {"a": {"rows": {"type": "supervised", "path": str(raw)}}}, "shard_rows": 10, "validation": 0.3}
    (tmp_path / "blend.yaml").write_text(json.dumps(blend))
    prepared = tmp_path / "prepared"
    assert whet("prep", str(tmp_path / "blend.yaml"), "--out", str(prepared)).returncode == 0
    data = {"type": "supervised", "path": f"{prepared}/train-*.jsonl"}
    settings = {"steps": 1, "algorithm": "sft", "model": str(tiny_model), "data": data}
    recipe, run_folder = read_settings(settings), tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "recipe.yaml").write_text(dump_yaml(recipe))
    record_run(recipe, run_folder, 0)
    assert not caplog.messages
    first, second, *_ = sorted(prepared.glob("train-*.jsonl"))
    first.write_text(first.read_text().replace("!", "?", 1))
    second.unlink()
    next(prepared.glob("validation-*.jsonl")).unlink()  # which this run doesn't read
    record_run(recipe, run_folder, 0)
    assert sorted(caplog.messages) == [
        f"data.path: {first} was changed since the prep wrote it",
        f"data.path: {second} is missing; the prep wrote it",
    ]


def test_the_file_of_a_users_function_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def length(answer):\n    return len(answer)\n")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}?"} for i in range(20)])
    data = {"type": "function", "path": str(rows), "reward": f"{code}:length"}
    recipe = read_settings({"steps": 1, "algorithm": "grpo", "model": str(tiny_model), "data": data})
    inputs = {each.setting: each for each in inputs_of(recipe, tmp_path / "run")}
    assert inputs["data.reward"].files == {str(code): digest(code)}
    assert inputs["data.path"].files == {str(rows): digest(rows)}


def test_a_run_that_is_opened_from_python_has_a_record(tiny_model: Path, tmp_path: Path) -> None:
    recipe = read_settings(toy_settings(tiny_model, steps=1))
    with whet_api.open(recipe, folder=tmp_path / "run"):
        record = read_record(tmp_path / "run")
    assert record is not None
    assert {each.setting for each in record.inputs} == {"model", "data"}


def test_a_damaged_record_does_not_stop_a_resume(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = read_settings(toy_settings(tiny_model, steps=1))
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    (tmp_path / FILE).write_text("{")
    record_run(recipe, tmp_path, 0, again=True)
    assert "the lineage begins with this process" in caplog.text
    assert read_record(tmp_path) is not None


def test_a_damaged_record_is_named_and_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text('{"kind": "run"')
    with pytest.raises(DataError, match=r"lineage\.json is damaged"):
        read_record(tmp_path)
    assert maker_of([tmp_path / "model.safetensors"]) is None
    assert "lineage.json is damaged" in caplog.text
    for text, problem in (
        ('{"format": 2, "kind": "run", "folder": "x"}', "format: expected 1"),
        ('{"kind": "run", "folder": "x", "inputs": [{"setting": "data"}]}', "inputs.0.name: is missing"),
        ("1.5", "it holds a float in place of an object"),
    ):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(DataError, match=rf"lineage\.json is damaged: {problem}"):
            read_record(tmp_path)
    assert read_record(tmp_path / "nowhere") is None


def test_a_copied_folder_has_the_record_under_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Record(kind="export", folder=str(tmp_path / "a"), step=3).write(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    record = read_record(tmp_path / "b")
    assert record is not None
    assert record.folder == str(tmp_path / "b")
    assert record.step == 3


def test_rows_of_answers_lead_back_to_their_run(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
    rows = tmp_path / "rows" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    of_answers(folder, rows).write(rows.parent)
    record = maker_of([rows])
    assert record is not None
    (source,) = record.inputs
    assert source.maker is not None
    assert source.maker.folder == str(folder)
    assert not record.problems()
    next((folder / "rollouts").iterdir()).write_text("changed")
    assert len(record.problems()) == 1


def test_generated_rows_name_no_file(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"type": "traces", "taskset": {"type": "arithmetic", "train_size": 4}}
    settings = {"steps": 1, "algorithm": "sft", "model": str(tiny_model), "data": data}
    inputs = inputs_of(read_settings(settings), tmp_path)
    assert [each.setting for each in inputs] == ["model"]
    assert not caplog.text
