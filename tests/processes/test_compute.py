"""All torch operations run on one thread of a process, and callers wait at most until their deadline."""

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.elsewhere import operations_elsewhere
from tests.rows import pairs, rows_recipe, write_rows
from tests.toy import toy_recipe
from whet.base.errors import DeadlineError
from whet.processes.compute import COMPUTE, compute, compute_now, run_computing
from whet.run import run
from whet.run.evaluate_model import evaluate_model


def test_work_is_done_on_the_compute_thread_while_the_loop_continues() -> None:
    async def main() -> None:
        release = threading.Event()
        waiting = asyncio.create_task(compute(release.wait, 60))
        for _ in range(3):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        release.set()
        assert await waiting
        assert (await compute(threading.current_thread)).name == "whet-compute"

    asyncio.run(main())


def test_a_deadline_names_what_is_waited_for_and_what_is_in_its_way() -> None:
    release = threading.Event()

    async def main() -> None:
        hanging = COMPUTE.submit(release.wait, 60, name="a long job")
        with pytest.raises(DeadlineError, match=r"named did not finish .* 0\.05 s; .* busy with a long job"):
            await compute(named, deadline=0.05)
        release.set()
        await asyncio.wrap_future(hanging)

    asyncio.run(main())


def named() -> None:
    raise AssertionError("a cancelled job must not run")


def test_a_timeout_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    def impatient() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        asyncio.run(compute(impatient))


def test_what_is_already_on_the_compute_thread_computes_at_once() -> None:
    assert compute_now(lambda: compute_now(threading.current_thread)).name == "whet-compute"


def test_a_coroutine_that_could_not_begin_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("No usable temporary directory found")

    async def work() -> None:
        raise AssertionError("never begun")

    monkeypatch.setattr("whet.processes.compute.computing", fail)
    main = work()
    with pytest.raises(FileNotFoundError):
        run_computing(main)
    assert inspect.getcoroutinestate(main) == inspect.CORO_CLOSED


def test_the_loops_own_thread_makes_no_team_while_a_run_computes() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:

        async def main() -> tuple[int, int]:
            return torch.get_num_threads(), await compute(torch.get_num_threads)

        assert run_computing(main()) == (1, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


RUNS: dict[str, dict[str, Any]] = {
    "in step": {},
    "one step off, replicas": {
        "rollouts": {"max_staleness": 1},
        "checkpoints": {"asynchronous": True},
        "generator": {"type": "torch", "dtype": "float32", "replicas": 2},
    },
    "critic, epochs": {"algorithm": {"type": "ppo", "group_size": 4, "minibatches": 3, "epochs": 2}},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[pytest.mark.slow] * (name != "one step off, replicas"))
        for name, changes in RUNS.items()
    ],
)
def test_a_run_computes_on_the_compute_thread_only(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling, learning, publishing with digest and probe, evaluation, checkpoints, records."""
    recipe = toy_recipe(tiny_model, steps=2, **changes)
    with operations_elsewhere(monkeypatch) as found:
        folder = run.start(recipe, tmp_path / "run")
    assert not found
    with operations_elsewhere(monkeypatch) as found:
        run.resume(folder, ["steps=3"])
        run_computing(evaluate_model(recipe, run=folder))
    assert not found


def test_a_run_over_rows_computes_on_the_compute_thread_only(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(24))
    recipe = rows_recipe(tiny_model, "preference", path, {"type": "dpo"}, steps=2)
    with operations_elsewhere(monkeypatch) as found:
        run.start(recipe, tmp_path / "run")
    assert not found


def test_the_watch_of_these_tests_sees_what_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with operations_elsewhere(monkeypatch) as found:
        other = threading.Thread(target=lambda: torch.ones(3) + 1, name="other")
        other.start()
        other.join()
        torch.zeros(2).mul(2)
        compute_now(torch.add, torch.empty(2), 1)
    assert {thread for thread, _ in found} == {"other", threading.current_thread().name}
