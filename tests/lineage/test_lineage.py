"""``whet lineage`` draws a chain back to raw files and forward to exports, and names what was changed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.forks import whet
from tests.rows import write_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Return a folder with raw data, prepared data, a run on them, its export, and a run that starts from that."""
    folder = tmp_path_factory.mktemp("chain")
    raw = write_rows(folder / "raw.jsonl", [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(30)])
    source = {"rows": {"type": "supervised", "path": str(raw)}, "licence": "MIT"}
    (folder / "blend.yaml").write_text(json.dumps({"sources": {"counting": source}}))
    data = {"type": "supervised", "path": str(folder / "prepared" / "train-*.jsonl"), "batch_size": 2}
    recipe = {"steps": 1, "algorithm": "sft", "model": str(tiny_model), "data": data, "sinks": ["jsonl"]}
    (folder / "sft.yaml").write_text(json.dumps(recipe))
    for words in (
        ["prep", f"{folder}/blend.yaml", "--out", f"{folder}/prepared"],
        ["train", f"{folder}/sft.yaml", "--folder", f"{folder}/runs/first"],
        ["export", f"{folder}/runs/first", "--out", f"{folder}/models/first", "--name", "first"],
        ["train", f"{folder}/sft.yaml", f"model={folder}/models/first", "--folder", f"{folder}/runs/second"],
    ):
        done = whet(*words, WHET_ARTIFACTS=f"{folder}/artifacts")
        assert done.returncode == 0, done.stderr
        assert ("registered: artifact:first:v1" in done.stdout) == ("--name" in words)
    return folder


def lines(*words: object) -> list[str]:
    """Return the lines of the drawn tree, without its branches."""
    done = whet("lineage", *map(str, words), COLUMNS="1000")
    assert done.returncode == 0, done.stderr
    return [line.lstrip("│├└─ ") for line in done.stdout.splitlines()]


def test_a_run_is_drawn_back_to_raw_files_and_forward_to_exports(made: Path, tiny_model: Path) -> None:
    drawn = lines(made / "runs" / "second")
    titles = [line.split(" (")[0] for line in drawn if not line[:1].isdigit()]
    assert titles == [
        f"run {made}/runs/second, seed 0",
        f"model: {made}/models/first",
        f"export {made}/models/first, step 1",
        f"checkpoint: {made}/runs/first/checkpoints/step-000001",
        f"run {made}/runs/first, seed 0",
        f"model: {tiny_model}",
        f"data.path: {made}/prepared/train-*.jsonl",
        f"prep {made}/prepared, seed 0",
        f"counting: {made}/raw.jsonl",
        f"data.path: {made}/prepared/train-*.jsonl",
        f"prep {made}/prepared, seed 0",
        f"counting: {made}/raw.jsonl",
        "made from it",
        "checkpoints of steps 1",
    ]
    assert any("MIT, 1 file, sha256:" in line for line in drawn)


def test_everything_that_was_made_from_a_target_is_found(made: Path) -> None:
    def forward(target: Path, *words: object) -> list[str]:
        drawn = lines(target, *words)
        return [line.split(",")[0] for line in drawn[drawn.index("made from it") :] if line.startswith(("run ", "exp"))]

    first, second, export = f"run {made}/runs/first", f"run {made}/runs/second", f"export {made}/models/first"
    assert forward(made / "runs" / "first") == [export, second]
    assert forward(made / "runs" / "first", "--within", made / "models") == [export]
    assert forward(made / "runs" / "first" / "checkpoints" / "step-000001") == [export, second]
    assert forward(made / "models" / "first") == [second]
    assert forward(made / "raw.jsonl", "--within", made, "--within", made / "runs") == [first, export, second, second]


def test_a_changed_or_missing_file_is_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "models" / "first", tmp_path / "copy")
    checked = whet("lineage", str(tmp_path / "copy"), "--check")
    assert checked.returncode == 0, checked.stderr
    raw = made / "raw.jsonl"
    content = raw.read_text()
    raw.write_text(content + "\n")
    (tmp_path / "copy" / "config.json").unlink()
    try:
        assert any(f"{raw} was changed since the prep read it" in line for line in lines(tmp_path / "copy"))
        checked = whet("lineage", str(tmp_path / "copy"), "--check", "--json")
    finally:
        raw.write_text(content)
    assert checked.returncode == 1
    assert json.loads(checked.stdout)["problems"] == [
        f"{tmp_path}/copy/config.json is missing",
        f"counting: {raw} was changed since the prep read it",
    ]
    assert f"{tmp_path}/copy/config.json is missing" in checked.stderr


def test_an_artifact_is_a_target_and_named_in_the_tree(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_ARTIFACTS", f"{made}/artifacts")
    assert lines("artifact:first:latest")[0] == f"export {made}/models/first, step 1 (first:v1)"
    wrong = whet("lineage", "artifact:first:v2")
    assert wrong.returncode == 2
    assert "first has no version 'v2'; it has v1, and 'latest'" in wrong.stderr


def test_the_card_of_a_model_has_its_history(made: Path) -> None:
    card = (made / "models" / "first" / "README.md").read_text()
    history = card.partition("## Lineage")[2].partition("## Use")[0]
    assert "from the run `first`, seed 0: `whet train" in history
    assert "- data.path: `train-*.jsonl` (1 file, sha256:" in history
    assert "- counting: `raw.jsonl` (MIT, 1 file, sha256:" in history


def test_a_wrong_target_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target, problem in (("nowhere", "there is no such file or folder"), ("empty", "has no lineage: name a run")):
        done = whet("lineage", str(tmp_path / target))
        assert done.returncode == 2
        assert problem in done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_to_look_in_must_be_there(made: Path, tmp_path: Path) -> None:
    done = whet("lineage", f"{made}/raw.jsonl", "--within", f"{tmp_path}/nowhere")
    assert done.returncode == 2
    assert f"error: --within {tmp_path}/nowhere: there is no such folder" in done.stderr
