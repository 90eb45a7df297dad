"""Checkpoints that are written during training are identical to synchronous ones, and as safe."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.test_resume import killed_and_resumed, metrics
from tests.forks import whet
from tests.parallel.saving import pieces
from tests.toy import toy_recipe, write_recipe
from whet.base.errors import WhetError
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.store import CheckpointStore
from whet.cluster.base import Placement
from whet.learner import state
from whet.learner.learner import WorkerLearner
from whet.run.run import resume, start

SPREAD = {"cluster": {"type": "processes"}, "parallel": {"fsdp": 2}}


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Return the contents of a checkpoint by name and position."""
    policy = CheckpointStore(folder / "checkpoints").load(step).folder / "policy"
    return pieces(policy) | {"facts": (policy / "learner.json").read_text()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name] == other[name] if name == "facts" else one[name].equal(other[name]) for name in one
    )


@pytest.mark.parametrize("spread", [{}, pytest.param(SPREAD, marks=pytest.mark.slow)], ids=["one", "two"])
def test_an_asynchronous_checkpoint_is_the_synchronous_one_and_is_resumed_exactly(
    spread: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    one = start(toy_recipe(tiny_model, steps=4, **spread), tmp_path / "stops")
    recipe = toy_recipe(tiny_model, steps=3, checkpoints={"asynchronous": True}, **spread)
    other = start(recipe, tmp_path / "resumed")
    assert all(same(saved(one, step), saved(other, step)) for step in (2, 3))
    resume(other, ["steps=4"])
    assert same(saved(one, 4), saved(other, 4))
    assert not list((other / "checkpoints").glob(".*"))


def test_training_continues_while_a_checkpoint_is_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is held up until the next step has learned: were training to wait, it would wait in vain."""
    learned, write, update = threading.Event(), state.save_tensors, WorkerLearner.update
    updates: list[bool] = []

    def slow(path: Path, tensors: Any) -> None:
        if ".staging-step-000001" in str(path):
            assert learned.wait(60)
        write(path, tensors)

    async def told(self: WorkerLearner, *args: Any) -> Any:
        result = await update(self, *args)
        updates.append(CheckpointStore(tmp_path / "run/checkpoints").latest() is None)
        if len(updates) == 2:
            learned.set()
        return result

    monkeypatch.setattr(state, "save_tensors", slow)
    monkeypatch.setattr(WorkerLearner, "update", told)
    folder = start(toy_recipe(tiny_model, steps=3, checkpoints={"asynchronous": True}), tmp_path / "run")
    assert updates[:2] == [True, True]
    assert CheckpointStore(folder / "checkpoints").steps() == [1, 2, 3]


@pytest.mark.parametrize("step", [2, 4], ids=["in the midst", "at the end"])
def test_a_save_that_fails_stops_the_run_and_costs_no_other_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write = state.save_tensors

    def broken(path: Path, tensors: Any) -> None:
        if f".staging-step-{step:06d}" in str(path):
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(state, "save_tensors", broken)
    recipe = toy_recipe(tiny_model, steps=4, checkpoints={"asynchronous": True})
    with pytest.raises(CheckpointError, match=f"no room for the checkpoint of step {step}"):
        start(recipe, tmp_path / "run")
    store = CheckpointStore(tmp_path / "run/checkpoints")
    assert max(store.steps()) == step - 1
    store.load(step - 1)
    assert not list(store.folder.glob(".staging*"))


def test_a_save_that_hangs_is_an_error_at_the_deadline(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(state, "save_tensors", lambda *_: end.wait(600))
    recipe = toy_recipe(tiny_model, steps=1, checkpoints={"asynchronous": True}, learner={"deadline": 10.0})
    with pytest.raises(WhetError, match=r"not written within learner\.deadline = 10 s"):
        start(recipe, tmp_path / "run")
    end.set()


class ManyRanks:
    """A group whose ranks have written their files at the last of some polls."""

    def __init__(self, ranks: int, polls: int) -> None:
        self.placement, self.polls = Placement(ranks), polls
        self.calls: list[str] = []

    async def call(self, method: str) -> list[bool]:
        self.calls.append(method)
        return [True] * (self.placement.ranks - 1) + [len(self.calls) >= self.polls]


@pytest.mark.parametrize(("ranks", "deadline", "seconds"), [(2, 1800.0, 0.1), (768, 1800.0, 9.6), (768, 20.0, 2.0)])
def test_many_ranks_are_asked_less_often(
    monkeypatch: pytest.MonkeyPatch, ranks: int, deadline: float, seconds: float
) -> None:
    """At most 80 ranks a second, and often enough before the deadline."""
    group, slept = ManyRanks(ranks, 4), list[float]()

    async def sleep(wanted: float) -> None:
        slept.append(wanted)

    monkeypatch.setattr("whet.learner.learner.asyncio.sleep", sleep)
    config: Any = SimpleNamespace(learner=SimpleNamespace(deadline=deadline))
    learner = WorkerLearner(group, config, None)  # type: ignore[arg-type]
    asyncio.run(learner.finish_save())
    assert slept == [seconds] * 3
    assert group.calls == ["state.save_written"] * 4 + ["state.finish_save"]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the folder of a run with synchronous checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    made = toy_recipe(tiny_model, steps=4, checkpoints={"every": 2}, evaluation={"enabled": False}, **SPREAD)
    done = whet("train", str(write_recipe(folder / "toy.yaml", made)), "--folder", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return metrics(folder / "run")


POINTS = ["step.copied:1", "step.copied:2", "checkpoint.half_written:2", "checkpoint.before_rename:2", "step.updated:3"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("crash_at", POINTS)
def test_a_kill_while_two_ranks_write_behind_training_loses_nothing_that_was_published(
    tiny_model: Path, undisturbed: list[dict[str, Any]], tmp_path: Path, crash_at: str
) -> None:
    settings = {"every": 2, "asynchronous": True}
    made = toy_recipe(tiny_model, steps=4, checkpoints=settings, evaluation={"enabled": False}, **SPREAD)
    recipe = write_recipe(tmp_path / "toy.yaml", made)
    assert killed_and_resumed(recipe, tmp_path / "run", crash_at) == undisturbed
