"""A run folder that an earlier version wrote is resumed, evaluated, shown and exported."""

import json
import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.toy import toy_recipe
from whet.base.digests import digest
from whet.base.errors import ConfigError
from whet.cli.main import main
from whet.lineage.record import Record, Session
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run

ADDED_FILES = ("lineage.json", "episodes.jsonl", ".lock")
ADDED_SETTINGS = ("profile", "devices.cost_per_hour", "evaluation.consensus")


def as_earlier(folder: Path) -> None:
    """Remove what later versions added to a run folder."""
    for name in ADDED_FILES:
        (folder / name).unlink(missing_ok=True)
    yaml = YAML()
    recipe = yaml.load(folder / "recipe.yaml")
    for key in ADDED_SETTINGS:
        *sections, last = key.split(".")
        around = recipe
        for section in sections:
            around = around[section]
        del around[last]
    yaml.dump(recipe, folder / "recipe.yaml")


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run.start(toy_recipe(tiny_model, steps=2, evaluation={"limit": 2}), tmp_path_factory.mktemp("runs") / "r")
    as_earlier(folder)
    return folder


@pytest.fixture
def earlier(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "r"))


def whet(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert not ended.value.code


def test_it_is_resumed(earlier: Path) -> None:
    whet("resume", str(earlier), "steps=3", "algorithm.loss.kl=0.01")  # which has further settings
    assert (
        "recipe.yaml lacks devices.cost_per_hour, profile, evaluation.consensus, which take"
        in (earlier / "log.txt").read_text()
    )
    steps = [line["step"] for line in read_metrics(earlier / "metrics.jsonl") if line["kind"] == "train"]
    assert steps[-3:] == [1, 2, 3]
    assert json.loads((earlier / "lineage.json").read_text())["sessions"]


@pytest.mark.parametrize("last", ["retries", "rollouts", "checkpoints"])
def test_a_recipe_that_was_cut_after_the_run_wrote_it_is_refused(earlier: Path, last: str) -> None:
    path = earlier / "recipe.yaml"
    whole = path.read_text()
    record = Record(kind="run", folder=str(earlier), sessions=(Session.now(),), recipe=digest(path))
    record.write(earlier)
    path.write_text(re.sub(rf"(?s)(\n *{last}:).*", "\n", whole))
    with pytest.raises(ConfigError, match=r"recipe.yaml was cut or edited: it lacks .*Put the file back"):
        run.resume(earlier, ["steps=3"])
    path.write_text(whole)
    assert run.resume(earlier, ["steps=3"]) == earlier


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval"], "accuracy"),
        (["view"], "toy/train/"),
        (["audit"], "each exactly once"),
        (["lineage"], "lineage.json is missing"),
        (["runs"], "2 of 2"),
    ],
)
def test_it_is_read(earlier: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    whet(*words, str(earlier.parent if words == ["runs"] else earlier))
    assert expected in capsys.readouterr().out


def test_it_is_exported(earlier: Path, tmp_path: Path) -> None:
    whet("export", str(earlier), "--out", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out" / "lineage.json").read_text())
    assert record["inputs"][0]["maker"]["folder"] == str(earlier)
