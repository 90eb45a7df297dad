"""A run whose learner loses a rank restarts its workers and resumes from its newest checkpoint, by itself."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forks import ForkedChild
from tests.toy import toy_recipe
from whet.base.errors import WorkerError
from whet.metrics.sinks import Kind, Sink, SinkConfig, Value
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.rollouts.audit import audit
from whet.run.run import start

_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


class Killer(SinkConfig):
    """Sends a signal to one rank of the learner when a step is done, once for each of ``at``."""

    at: tuple[int, ...] = (3,)
    by: int = signal.SIGKILL

    def open(self, folder: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> Sink:
        return _Killer(self, folder / "killed")


class _Killer(Sink):
    def __init__(self, config: Killer, memory: Path) -> None:
        self.config, self.memory = config, memory

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        killed = self.memory.read_text().split() if self.memory.exists() else []
        due = self.config.at[len(killed) :]
        if due and step == due[0] and kind == "train":
            self.memory.write_text(" ".join([*killed, str(step)]))
            os.kill(hosts()[-1], self.config.by)


def hosts(*names: str) -> list[int]:
    """The processes of this one's learners, or those below it whose command has one of these names."""
    found = list[int]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            command = ForkedChild.codes.get(process.pid) or "".join(process.cmdline())
            if any(name in command for name in names or ("cluster.host", "RayHost")):
                found.append(process.pid)
    return sorted(found)


def measured(folder: Path) -> list[dict[str, Any]]:
    rows = [without_time(row) for row in read_metrics(folder / "metrics.jsonl")]
    return [{name: value for name, value in row.items() if name != "cluster/restarts"} for row in rows]


def restarts(folder: Path) -> list[float]:
    return [row["cluster/restarts"] for row in read_metrics(folder / "metrics.jsonl") if "cluster/restarts" in row]


SETTINGS: dict[str, Any] = {
    "steps": 4,
    "evaluation": {"every": 2},
    "checkpoints": {"every": 2},
    "cluster": {"type": "processes"},
    "rollouts": {"prompts_per_step": 2},
}


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return measured(start(toy_recipe(tiny_model, **SETTINGS), tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "at"),
    [("processes", (3,)), ("processes", (1, 3)), pytest.param("ray", (3,), marks=_RAY)],
)
def test_a_run_that_loses_a_rank_ends_with_the_same_bits(
    cluster: str, at: tuple[int, ...], undisturbed: list[dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    killer = {"type": "tests.e2e.test_restarts:Killer", "at": at}
    recipe = toy_recipe(tiny_model, **SETTINGS | {"sinks": ["jsonl", killer], "cluster": {"type": cluster}})
    run = start(recipe, tmp_path / "run")
    assert measured(run) == undisturbed
    assert restarts(run) == ([1.0] if at == (3,) else [1.0, 2.0])
    found = audit(run)
    assert not found.violations
    assert (found.step, found.later) == (4, 0)


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced_and_ranks_meet_again(tiny_model: Path, tmp_path: Path) -> None:
    killer = {"type": "tests.e2e.test_restarts:Killer", "by": int(signal.SIGSTOP)}
    settings = SETTINGS | {"parallel": {"fsdp": 2}, "learner": {"matmul_precision": "highest", "deadline": 20.0}}
    whole = start(toy_recipe(tiny_model, **settings), tmp_path / "whole")
    run = start(toy_recipe(tiny_model, **settings | {"sinks": ["jsonl", killer]}), tmp_path / "run")
    assert measured(run) == measured(whole)
    assert restarts(run) == [1.0]


@pytest.mark.usefixtures("forked_children")
def test_more_restarts_than_allowed_end_a_run(tiny_model: Path, tmp_path: Path) -> None:
    killer = {"type": "tests.e2e.test_restarts:Killer", "at": (1, 2)}
    settings = SETTINGS | {"sinks": ["jsonl", killer], "cluster": {"type": "processes", "restarts": 1}}
    with pytest.raises(WorkerError, match=r"LearnerWorker\.\S+ failed because rank 0 of 1 .* was killed by SIGKILL"):
        start(toy_recipe(tiny_model, **settings), tmp_path / "run")
