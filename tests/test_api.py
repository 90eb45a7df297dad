"""whet from Python: a recipe by name or as values, in scripts and in notebooks."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import whet
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.base.errors import ConfigError, DataError
from whet.config import RecipeError
from whet.core.types import Task


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))


def test_a_run_is_started_and_gone_on_with(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whet.start(recipe, "rollouts.prompts_per_step=2", folder=tmp_path / "run", data=Lowercase())
    assert (folder / "report.html").exists()
    assert "1 step in" in capsys.readouterr().out
    assert whet.resume(folder, "steps=2") == folder
    assert "2 steps" in capsys.readouterr().out


def test_a_notebook_has_a_loop_of_its_own(recipe: Path, tmp_path: Path) -> None:
    async def cell() -> Path:
        return whet.start(recipe, folder=tmp_path / "run")

    assert (asyncio.run(cell()) / "report.html").exists()


def test_sections_are_checked_as_a_recipe_is() -> None:
    assert whet.read(steps=7).steps == 7
    with pytest.raises(RecipeError, match="steps"):
        whet.read(steps=0)
    with pytest.raises(RecipeError, match="Did you mean 'steps'"):
        whet.read("quickstart", "stepz=3")
    with pytest.raises(RecipeError, match=r"given: data: unknown type 'no such tasks'"):
        whet.read(data="no such tasks")
    with pytest.raises(RecipeError, match=r"^given: sampling\.top_k: no part of the run reads it"):
        whet.read("sft-gsm8k", sampling={"top_k": 3})
    with pytest.raises(RecipeError, match=r"override 1 .* expected a text such as 'steps=2', got a list"):
        whet.read("quickstart", ["steps=3"])  # type: ignore[arg-type]


def test_settings_next_to_a_recipe_that_is_a_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give steps=3, data=\.\.\. to whet\.read"):
        whet.start(whet.read(), "steps=3", data="arithmetic", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def yielding(step: int, metrics: dict[str, Any]) -> Iterator[None]:
    yield


async def yielding_async(step: int, metrics: dict[str, Any]) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("on_step", "words"),
    [
        (3, "on_step is 3; it must be a function of a step and a dict of its metrics"),
        (lambda step: None, r"on_step is called with .*, and <lambda>\(step\) can't be: too many positional"),
        (lambda step, metrics, name: None, "missing a required argument: 'name'"),
        (yielding, r"on_step: yielding \(.*test_api.py:\d+\) contains `yield`, so a call runs no line of it"),
        (yielding_async, "on_step: yielding_async .* contains `yield`"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_the_first_step(
    on_step: Any, words: str, recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    rows = [{"prompt": "x", "completion": "y"}] * 3
    for call in (
        lambda: whet.start(recipe, folder=folder, on_step=on_step),
        lambda: whet.train(model="m", data=rows, folder=folder, on_step=on_step),
        lambda: whet.resume(folder, on_step=on_step),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, whet.SPINS), ({"OMP_WAIT_POLICY": "ACTIVE"}, "unset"), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["nothing is set", "a policy is set", "a number is set"],
)
def test_waiting_threads_spin_for_a_short_time_unless_the_environment_says_otherwise(
    given: dict[str, str], spins: str
) -> None:
    code = "import whet, os; print(os.environ.get('GOMP_SPINCOUNT', 'unset'))"
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-c", code], env=others | given, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{spins}\n"


def test_a_source_tree_that_is_not_installed_trains(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> metadata.Distribution:
        if name == "whet":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    real = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", found)
    folder = whet.start(recipe, folder=tmp_path / "run")
    assert f"whet {whet.__version__}, torch " in (folder / "log.txt").read_text()


def test_the_name_of_the_package_imports_nothing_heavy() -> None:
    code = "import sys, whet; print(whet.__version__, sorted({'torch', 'pydantic'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{whet.__version__} []\n"
    with pytest.raises(AttributeError, match="'whet' has no attribute 'strat'"):
        whet.strat  # type: ignore[attr-defined]  # noqa: B018


class HalfCharacters(Lowercase):
    """Poses tasks that were read with errors='surrogateescape'."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"half/{split}/{n}", [{"role": "user", "content": f"caf\udce9 {n}"}]) for n in range(8)]


def test_a_task_with_half_a_character_is_named_by_its_text(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a text has half a character, '\\udce9' after 'caf'"):
        whet.start(recipe, folder=tmp_path / "run", data=HalfCharacters())
