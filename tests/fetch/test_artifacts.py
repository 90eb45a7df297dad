"""Exports under names with versions resolve wherever a model's path is accepted."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.toy import toy_settings, write_settings
from whet.base.digests import digest
from whet.base.errors import ConfigError
from whet.config import RecipeError, load
from whet.fetch.artifacts import artifact_folder, names_of, register
from whet.fetch.model import check_model, fetch_model
from whet.models.config import ModelConfig
from whet.run.recipe import Recipe
from whet.tasks.preference.reward_model import RewardModelTasks


@pytest.fixture
def exported(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model's folder; the working folder is where its artifacts lie."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def files(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in folder.iterdir()}


def test_versions_are_counted_and_the_latest_is_the_highest(exported: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(exported, tmp_path / "other"))
    assert [register("policy", folder, files(folder)) for folder in (exported, *9 * [other])][-1] == "policy:v10"
    assert artifact_folder("artifact:policy:v1") == exported
    assert artifact_folder("artifact:policy") == artifact_folder("artifact:policy:latest") == other
    assert names_of(exported) == ["policy:v1"]


def test_processes_that_register_at_once_get_different_versions(exported: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda _: register("policy", exported, {}), range(40)))
    assert sorted(versions) == sorted(f"policy:v{number}" for number in range(1, 41))


def test_every_path_of_a_model_may_be_an_artifact(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("policy", exported, files(exported))
    name = "artifact:policy:latest"
    assert fetch_model(name) == exported
    check_model(name)
    assert ModelConfig(path=name).path == str(exported)
    recipe = load(Recipe, write_settings(tmp_path / "toy.yaml", toy_settings(Path("none"), model={"path": name}))).value
    assert recipe.model.path == str(exported)
    assert RewardModelTasks.model_validate({"taskset": {"type": "arithmetic"}, "model": name}).model == str(exported)
    monkeypatch.setenv("WHET_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path / "model")
    assert fetch_model(name) == exported


def test_a_wrong_name_or_version_lists_what_there_is(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="artifacts has no artifact 'policy'"):
        artifact_folder("artifact:policy")
    register("policy", exported, {})
    register("policy", exported, {})
    for name, problem in (
        ("polcy", "Did you mean 'policy'"),
        ("policy:v3", "policy has no version 'v3'; it has v1, v2, and 'latest'"),
        ("policy:newest", "policy has no version 'newest'"),
        ("../policy", "can't be the name of an artifact"),
    ):
        with pytest.raises(ConfigError, match=problem):
            artifact_folder(f"artifact:{name}")
    file = write_settings(tmp_path / "toy.yaml", toy_settings(exported))
    with pytest.raises(RecipeError, match=r"model\.path: artifact:policy:v3: policy has no version"):
        load(Recipe, file, ["model.path=artifact:policy:v3"])
    with pytest.raises(ConfigError, match="can't be the name"):
        register("a/b", exported, {})


def test_a_lost_or_changed_artifact_is_named(exported: Path, tmp_path: Path) -> None:
    (exported / "README.md").write_text("a card")
    register("policy", exported, files(exported))
    (exported / "README.md").write_text("a card that was edited")
    assert artifact_folder("artifact:policy") == exported
    weights = exported / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"\(policy:v1\) was changed: .*model\.safetensors is not the file"):
        artifact_folder("artifact:policy")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"is not complete: .*model\.safetensors"):
        artifact_folder("artifact:policy")
    shutil.rmtree(exported)
    with pytest.raises(ConfigError, match="is lost: there is no folder"):
        artifact_folder("artifact:policy")
    (tmp_path / "artifacts" / "policy" / "v1.json").write_text(json.dumps({"folder": 3}))
    with pytest.raises(ConfigError, match=r"v1\.json is damaged"):
        artifact_folder("artifact:policy")
