"""The end of a run: after a signal it saves and reports the command to resume; without its folder it fails clearly."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.fault_contract import eventually
from tests.e2e.test_resume import metrics
from tests.forks import Fork, whet, whet_fork
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.base.errors import WhetError
from whet.core.types import Task
from whet.run import run
from whet.run.signals import Stopped


class Held(Lowercase):
    """The second step is held while it is sampled, until the test lets it pass."""

    run: str = ""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if self.run and steps_done(Path(self.run)):
            held(Path(self.run)).touch()
            assert await asyncio.to_thread(eventually, passes(Path(self.run)).exists, 200)
        return await super().grade(task, answer)


class HeldEvaluation(Lowercase):
    """The evaluation after ``steps`` steps never ends."""

    run: str
    steps: int

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if "/test/" in task.uid and steps_done(Path(self.run)) == self.steps:
            held(Path(self.run)).touch()
            await asyncio.sleep(3600)
        return await super().grade(task, answer)


def held(folder: Path) -> Path:
    """Return the file next to the run's folder that marks a waiting step."""
    return folder.with_suffix(".held")


def passes(folder: Path) -> Path:
    """Return the file next to the run's folder that allows its steps to continue."""
    return folder.with_suffix(".passes")


def recipe(model: Path, run: Path | None = None, **changes: Any) -> Any:
    changes["data"] = {"type": "tests.e2e.test_stop_signals:Held", "run": str(run or "")}
    return toy_recipe(model, **{"steps": 6, "checkpoints": {"every": 0}, **changes})


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"train"' in line), default=0)


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[Fork]:
    """Start a run in a separate process, and hold it in its second step."""
    with whet_fork("train", *arguments, "--folder", str(folder), merged=True) as process:
        try:
            assert eventually(lambda: held(folder).exists() or process.poll() is not None, 240)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("by", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_saves_the_run_and_reports_the_command_to_resume(
    by: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    path = write_recipe(tmp_path / "held.yaml", recipe(tiny_model, folder))
    with running([str(path)], folder) as process:
        process.send_signal(by)
        assert process.stdout is not None
        said = next(line for line in process.stdout if "the next signal ends it at once" in line)
        passes(folder).touch()
        printed, _ = process.communicate(timeout=240)
    assert f"{by.name} came: the run saves after this step and ends" in said
    assert process.returncode == 128 + by
    assert steps_done(folder) == 2
    assert f"stopped: {by.name} came, and step 2 of 6 is saved. Resume with: whet resume {folder}" in printed
    assert "Traceback" not in printed
    went_on = whet("resume", str(folder))
    assert went_on.returncode == 0, went_on.stderr
    undisturbed = run.start(recipe(tiny_model), tmp_path / "undisturbed")
    assert metrics(folder) == metrics(undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_a_signal_saves_a_run_on_ray_too(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = write_recipe(tmp_path / "held.yaml", recipe(tiny_model, folder, cluster="ray"))
    with running([str(path)], folder) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert any("the next signal ends it at once" in line for line in process.stdout)
        passes(folder).touch()
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert f"step {steps_done(folder)} of 6 is saved. Resume with: whet resume {folder}" in printed
    assert list((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "steps", [2, pytest.param(6, marks=pytest.mark.slow)], ids=["after some steps", "after all steps"]
)
def test_a_signal_during_an_evaluation_gives_it_up_and_saves(steps: int, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    data = {"type": "tests.e2e.test_stop_signals:HeldEvaluation", "run": str(folder), "steps": steps}
    settings = toy_recipe(tiny_model, steps=6, checkpoints={"every": 0}, evaluation={"every": 2}, data=data)

    def stop() -> None:
        assert eventually(held(folder).exists, 240)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    advice = "is saved. Resume with: whet resume" if steps == 2 else "is saved, without its evaluation. Evaluate with"
    with pytest.raises(Stopped, match=f"SIGTERM came, and step {steps} of 6 {advice}"):
        run.start(settings, folder)
    assert (folder / "checkpoints" / f"step-{steps:06d}").is_dir()
    if steps == 2:
        undisturbed = run.start(toy_recipe(tiny_model, steps=6, evaluation={"every": 2}), tmp_path / "undisturbed")
        learned = [row for row in metrics(undisturbed) if row["kind"] == "train"]
        assert [row for row in metrics(run.resume(folder)) if row["kind"] == "train"] == learned


def test_a_signal_before_the_first_step_ends_the_run_at_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    data = {"type": "tests.e2e.test_stop_signals:HeldEvaluation", "run": str(folder), "steps": 0}
    path = write_recipe(tmp_path / "held.yaml", toy_recipe(tiny_model, data=data))
    with running([str(path)], folder) as process:
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert "SIGTERM came: the run ends at once, because it has no new step to save" in printed
    assert f"ended by SIGTERM. Resume with: whet resume {folder}" in printed
    assert "ended without a message" not in printed


def test_a_second_signal_ends_the_run_at_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = write_recipe(tmp_path / "held.yaml", recipe(tiny_model, folder))
    with running([str(path)], folder) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert any("the next signal ends it at once" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == -signal.SIGTERM, "though its step never passes"


def test_signals_are_as_they_were_after_a_run_and_an_ignored_one_stays_ignored(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    during = []
    grade = Lowercase.grade

    async def noting(self: Lowercase, task: Task, answer: str) -> dict[str, float]:
        during.append((signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGHUP)))
        return await grade(self, task, answer)

    monkeypatch.setattr(Lowercase, "grade", noting)
    try:
        run.start(toy_recipe(tiny_model, steps=1), tmp_path / "run")
        assert set(during) == {(False, signal.SIG_IGN)}
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_is_an_error_with_the_code_of_its_signal(tiny_model: Path, tmp_path: Path, asynchronous: bool) -> None:
    folder = tmp_path / "run"
    settings = recipe(tiny_model, folder, checkpoints={"every": 0, "asynchronous": asynchronous})

    def stop() -> None:
        assert eventually(held(folder).exists, 240)
        os.kill(os.getpid(), signal.SIGTERM)
        passes(folder).touch()

    threading.Thread(target=stop).start()
    with pytest.raises(Stopped, match="SIGTERM came, and step 2 of 6 is saved") as stopped:
        run.start(settings, folder)
    assert stopped.value.exit_code == 143
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000002"]


def test_the_end_of_a_jobs_time_is_a_stop_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    settings = recipe(tiny_model, checkpoints={"every": 0, "before": "2m"})
    with pytest.raises(Stopped, match=r"time is over in less than 120 s, and step 1 of 6 is saved") as stopped:
        run.start(settings, tmp_path / "run")
    assert stopped.value.exit_code == 143
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-000001"]


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_run_whose_folder_is_moved_stops_and_writes_nothing_under_the_old_name(
    how: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def move() -> None:
        assert eventually(held(folder).exists, 240)
        folder.rename(elsewhere)
        if how == "replaced":
            folder.mkdir()
        passes(folder).touch()

    threading.Thread(target=move).start()
    with pytest.raises(WhetError, match=rf"the run folder {folder} was moved, removed or replaced"):
        run.start(recipe(tiny_model, folder, checkpoints={"every": 1}), folder)
    assert not folder.exists() or not list(folder.iterdir())
    assert run.resume(elsewhere, ["steps=2"]) == elsewhere


class Exits(Lowercase):
    def tasks(self, split: str) -> list[Task]:
        raise SystemExit(0)


def test_an_exit_outside_of_a_grader_is_an_error_too(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=rf"tried to end the process: SystemExit\(0\) at {__file__}:"):
        run.start(toy_recipe(tiny_model, data={"type": "tests.e2e.test_stop_signals:Exits"}), tmp_path / "run")
