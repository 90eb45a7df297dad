"""A run that is told to end: by a signal it saves and says how to go on; without its folder it stops in words."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import metrics, whet
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet import run
from whet.errors import WhetError
from whet.stop_signals import Stopped
from whet.types import Task


class Slow(Lowercase):
    """A step takes a while, so that there is time to send a signal."""

    seconds: float = 0.3

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        time.sleep(self.seconds / 12)
        return await super().grade(task, answer)


def recipe(folder: Path, **changes: Any) -> Any:
    changes["data"] = {"type": "tests.e2e.test_stop_signals:Slow"} | changes.get("data", {})
    return toy_recipe(folder, **{"steps": 6, "checkpoints": {"every": 0}, **changes})


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"train"' in line), default=0)


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run in a process of its own, after its first step."""
    with subprocess.Popen(
        [sys.executable, "-m", "whet", "train", *arguments, "--folder", str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever tests may ignore it (nohup)
    ) as process:
        until = time.monotonic() + 120
        while not steps_done(folder) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("by", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_saves_the_run_and_says_how_to_go_on_and_nothing_is_lost(
    by: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    path, folder = write_recipe(tmp_path / "slow.yaml", recipe(tiny_model)), tmp_path / "run"
    with running([str(path)], folder) as process:
        process.send_signal(by)
        printed, _ = process.communicate(timeout=60)
    done = steps_done(folder)
    assert process.returncode == 128 + by
    assert f"{by.name} came: the run saves after this step and ends; another one ends it at once" in printed
    assert f"stopped: {by.name} came, and step {done} of 6 is saved. Go on with: whet resume {folder}" in printed
    assert "Traceback" not in printed
    assert 1 <= done < 6
    went_on = whet("resume", str(folder))
    assert went_on.returncode == 0, went_on.stderr
    undisturbed = run.start(recipe(tiny_model), tmp_path / "undisturbed")
    assert metrics(folder) == metrics(undisturbed)


def test_a_second_signal_ends_the_run_at_once(tiny_model: Path, tmp_path: Path) -> None:
    path, folder = write_recipe(tmp_path / "slow.yaml", recipe(tiny_model, data={"seconds": 4.0})), tmp_path / "run"
    with running([str(path), "evaluation.enabled=false"], folder) as process:
        time.sleep(0.5)  # it is in the midst of its second step
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert any("another one ends it at once" in line for line in process.stdout)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        assert time.monotonic() - begun < 2


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
    timer = threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    settings = recipe(tiny_model, checkpoints={"every": 0, "asynchronous": asynchronous})

    def once_begun() -> None:
        while not steps_done(tmp_path / "run"):
            time.sleep(0.02)
        timer.start()

    threading.Thread(target=once_begun).start()
    with pytest.raises(Stopped, match=r"SIGTERM came, and step \d of 6 is saved") as stopped:
        run.start(settings, tmp_path / "run")
    assert stopped.value.exit_code == 143
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


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
        while not steps_done(folder):
            time.sleep(0.02)
        time.sleep(0.2)  # it is sampling
        folder.rename(elsewhere)
        if how == "replaced":
            folder.mkdir()

    threading.Thread(target=move).start()
    with pytest.raises(WhetError, match=rf"the run folder {folder} was moved, removed or replaced"):
        run.start(recipe(tiny_model, checkpoints={"every": 1}, data={"seconds": 1.0}), folder)
    assert not folder.exists() or not list(folder.iterdir())
    assert run.resume(elsewhere, ["steps=2"]) == elsewhere


class Exits(Lowercase):
    def tasks(self, split: str) -> list[Task]:
        raise SystemExit(0)


def test_an_exit_outside_of_a_grader_is_an_error_too(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=rf"tried to end the process: SystemExit\(0\) at {__file__}:"):
        run.start(recipe(tiny_model, data={"type": "tests.e2e.test_stop_signals:Exits"}), tmp_path / "run")
