"""Environment workers with an interpreter of their requirements, which the run doesn't have."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.worker_tasks import Versioned
from tests.toy import toy_recipe
from tests.wheels import toy_wheel
from whet.base.errors import ConfigError
from whet.metrics.sinks.jsonl import read_metrics
from whet.run.run import start
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.workers import WorkerTasks


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The virtual environments of all tests in this file."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WHET_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def wheels(cache: Path) -> dict[float, str]:
    return {version: toy_wheel(cache, str(version)) for version in (1.0, 2.0)}


@pytest.mark.slow
def test_task_sets_that_need_two_versions_of_a_package_train_in_one_run(
    wheels: dict[float, str], tiny_model: Path, tmp_path: Path
) -> None:
    def part(requirements: Any) -> dict[str, Any]:
        return {"type": "workers", "processes": 1, "taskset": _VERSIONED, "requirements": requirements}

    listed = tmp_path / "requirements.txt"
    listed.write_text(f"# the new one\n\n{wheels[2.0]}\n")
    parts = {"old": {"taskset": part([wheels[1.0]])}, "new": {"taskset": part(str(listed))}}
    start(toy_recipe(tiny_model, steps=1, data={"type": "blend", "of": parts}), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name, version in (("old", 1.0), ("new", 2.0)):
        assert {row[key] for row in rows if (key := f"env/{name}/reward") in row} == {version}
    assert "environment_workers/restarts" not in rows[-1]


def test_the_package_lists_and_grades_and_torch_is_not_imported(wheels: dict[float, str]) -> None:
    taskset = WorkerTasks(taskset=Versioned(), processes=1, requirements=(wheels[2.0],))

    async def main() -> dict[str, float]:
        environments = IsolatedEnvironments(taskset.open())
        try:
            with pytest.raises(RuntimeError, match=r"toytool\.ToyError: an error of the package"):
                await play(environments.make(taskset.tasks("train")[0]), "raise")
            _, step = await play(environments.make(taskset.tasks("train")[0]), "x")
            return {"reward": step.reward, **step.scores}
        finally:
            await environments.close()

    assert asyncio.run(main()) == {"reward": 2.0, "listed": 2.0, "torch": 0.0}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        pytest.param(
            {"requirements": ["--no-index", "toytool==3.0"]},
            r"toytool==3\.0 can't be installed: .*toytool==3\.0",
            marks=pytest.mark.slow,
        ),
        ({"requirements": "nowhere.txt"}, r"requirements: the file nowhere\.txt can't be read"),
        ({"requirements": ["-r other.txt"]}, r"'-r other\.txt' refers to another file"),
        ({"python": "nosuchpython"}, r"python: the interpreter nosuchpython was not found"),
        ({"python": "false"}, r"python: .*false doesn't run as a Python interpreter"),
    ],
)
def test_what_cannot_be_installed_ends_the_run_before_it_starts(
    settings: dict[str, Any], why: str, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = toy_recipe(tiny_model, data={"type": "workers", "taskset": _VERSIONED, **settings})
    with pytest.raises(ConfigError, match=why):
        start(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


_VERSIONED = "tests.tasks.worker_tasks:Versioned"
