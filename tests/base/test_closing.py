"""The parts of a run are closed after any failure, and the first error is raised."""

import asyncio
import gc
import logging
from pathlib import Path

import pytest

from tests.toy import Lowercase, toy_recipe
from whet.base.closing import Closing, gather_or_cancel
from whet.base.errors import DataError
from whet.cluster.local import LocalCluster
from whet.core.types import Task
from whet.engines.torch.generator import TorchGenerator
from whet.learner.learner import WorkerLearner
from whet.metrics.sinks import OpenSinks
from whet.run import run

PARTS = {"sinks": OpenSinks, "learner": WorkerLearner, "cluster": LocalCluster, "generator": TorchGenerator}


class NoTasks(Lowercase):
    """A task set whose file is bad."""

    def tasks(self, split: str) -> list[Task]:
        raise DataError("line 3 of the tasks is bad")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of a run that were closed, in order. Closing a learner raises after its work is done."""
    names: list[str] = []
    for name, part in PARTS.items():
        close = part.close

        def closing(self: object, name: str = name, close: object = close) -> object:
            names.append(name)
            return close(self)  # type: ignore[operator]

        async def failing(self: WorkerLearner, closing: object = closing) -> None:
            await closing(self)  # type: ignore[operator]
            raise RuntimeError("the learner does not close")

        monkeypatch.setattr(part, "close", failing if name == "learner" else closing)
    return names


def test_a_learner_that_does_not_close_is_an_error_and_the_rest_is_closed(
    tiny_model: Path, tmp_path: Path, closed: list[str]
) -> None:
    with pytest.raises(RuntimeError, match="does not close"):
        run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
    assert closed == ["learner", "sinks", "generator", "cluster"]


def test_it_does_not_hide_why_the_run_ended(
    tiny_model: Path, tmp_path: Path, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def update(*_: object) -> None:
        raise DataError("the cause")

    monkeypatch.setattr(WorkerLearner, "update", update)
    with pytest.raises(DataError, match="the cause"):
        run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
    assert closed == ["learner", "sinks", "generator", "cluster"]
    assert "the learner of policy could not be closed: RuntimeError" in (tmp_path / "run/log.txt").read_text()


def test_a_bad_task_set_is_found_before_a_learner_is_loaded(
    tiny_model: Path, tmp_path: Path, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLearner, "launch", lambda *_: pytest.fail("a learner is loaded"))
    with pytest.raises(DataError, match="line 3"):
        run.start(toy_recipe(tiny_model, data={"type": "tests.base.test_closing:NoTasks"}), tmp_path / "run")
    assert "learner" not in closed


def test_the_first_of_several_errors_is_raised_and_the_others_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with Closing() as closing:
            closing.closes("one", lambda: fail("of one"))
            closing.closes("two", lambda: fail("of two"))

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="of two"):
        asyncio.run(go())
    assert "one could not be closed: RuntimeError: of one" in caplog.text


async def wait_for_cancellation(ended: list[str], name: str, ticks: int) -> None:
    """End some ticks of the loop after the cancellation, and note the name then."""
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(ticks):
            await asyncio.sleep(0)
        ended.append(name)


async def fail(words: str) -> None:
    raise RuntimeError(words)


def test_calls_that_run_at_once_have_ended_when_the_error_of_one_is_raised(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> list[str]:
        ended: list[str] = []
        quick, slow = wait_for_cancellation(ended, "quick", 0), wait_for_cancellation(ended, "slow", 5)
        with pytest.raises(RuntimeError, match="the first error"):
            await gather_or_cancel([quick, fail("the first error"), fail("the second error"), slow])
        return ended

    assert asyncio.run(go()) == ["quick", "slow"]
    gc.collect()
    assert "second error" not in capfd.readouterr().err


def test_calls_that_run_at_once_have_ended_when_their_caller_is_cancelled() -> None:
    """``asyncio.gather`` ends with the first call that ends."""

    async def go() -> list[str]:
        ended: list[str] = []
        calls = [wait_for_cancellation(ended, "quick", 0), wait_for_cancellation(ended, "slow", 5)]
        caller = asyncio.create_task(gather_or_cancel(calls))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()
        return ended

    assert asyncio.run(go()) == ["quick", "slow"]


def test_results_of_calls_that_run_at_once_are_in_order() -> None:
    async def after(ticks: int) -> int:
        for _ in range(ticks):
            await asyncio.sleep(0)
        return ticks

    async def go() -> list[int]:
        assert await gather_or_cancel([]) == []
        return await gather_or_cancel(map(after, [3, 0, 2]))

    assert asyncio.run(go()) == [3, 0, 2]
