"""User code that exits, forks, blocks or ignores cancellation: a run names the episode, fails clearly, and ends only
itself. Each run is a process with its own limits."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.forks import finished, limited_whet_fork, whet_fork
from tests.rollouts.test_source import source
from tests.toy import Lowercase, toy_settings, write_settings
from whet.base.errors import WhetError
from whet.core.types import Task
from whet.processes.sentinel import endings_are_errors


class Loud(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Hostile(Lowercase):
    """Does one thing that graders shouldn't."""

    does: str
    correct: float = 1.0

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        await getattr(self, f"_{self.does}")()
        return await super().grade(task, answer) | {"correct": self.correct}

    async def _nothing(self) -> None:
        pass

    async def _exits(self) -> None:
        sys.exit(0)

    async def _ends_the_process(self) -> None:
        os._exit(0)

    async def _becomes_another_program(self) -> None:
        os.execv("/bin/true", ["true"])

    async def _holds_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(3600)

    async def _raises_cancelled(self) -> None:
        raise asyncio.CancelledError

    async def _raises_generator_exit(self) -> None:
        raise GeneratorExit

    async def _raises_base_exception(self) -> None:
        raise BaseException("out of reach")

    async def _raises_what_has_no_text(self) -> None:
        raise Loud

    async def _blocks(self) -> None:
        time.sleep(3600)

    async def _computes_for_ever(self) -> None:
        while True:
            pass

    async def _blocks_a_helper_thread(self) -> None:
        await asyncio.to_thread(time.sleep, 3600)

    async def _does_not_listen(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def _leaves_an_exit_behind(self) -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 0)

    async def _forks(self) -> None:
        with open("forks", "a+") as file:  # never more than a few, should this test fail
            file.write("x")
            if file.tell() <= 24:
                os.fork()


def train(folder: Path, model: Path, does: str, deadline: float = 60.0) -> tuple[int, str]:
    """The exit code of a run, which ends within the limit, and what it printed."""
    recipe = write_settings(
        folder / "recipe.yaml",
        toy_settings(
            model,
            steps=2,
            data={"type": "tests.e2e.test_hostile_code:Hostile", "does": does},
            rollouts={"deadline": deadline, "retries": 1},
            evaluation={"enabled": False},
        ),
    )
    done = finished(limited_whet_fork("train", str(recipe), "--folder", "run", folder=folder), 240)
    return done.returncode, done.stdout


RAISED = {
    "exits": "SystemExit(0) at ",
    "ends_the_process": "os._exit(0) at ",
    "becomes_another_program": "os.execv('/bin/true', ['true']) at ",
    "raises_cancelled": "CancelledError() at ",
    "raises_generator_exit": "GeneratorExit() at ",
    "raises_base_exception": "BaseException('out of reach') at ",
    "raises_what_has_no_text": "Loud (its text can't be formatted) at ",
}


@pytest.mark.parametrize("does", RAISED)
def test_an_error_of_a_grader_fails_its_episode_and_is_named_with_its_line(does: str, tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Hostile(does=does), retries=1, max_failed=0.0) as rollouts:
            with pytest.raises(WhetError, match=r"were lost to failures.* \d{7}:toy/train/\d+: ") as failure:
                await rollouts.next_groups()
            assert f"{RAISED[does]}{__file__}:" in str(failure.value)

    with endings_are_errors():  # until the last grader has ended: others may still be at work when one has failed
        asyncio.run(go())


@pytest.mark.parametrize(
    "does",
    [
        "exits",
        *(pytest.param(does, marks=pytest.mark.slow) for does in ("ends_the_process", "becomes_another_program")),
    ],
)
def test_an_exit_in_a_grader_is_an_error_of_the_run_and_not_its_end(
    does: str, tiny_model: Path, tmp_path: Path
) -> None:
    code, printed = train(tmp_path, tiny_model, does)
    assert code == 1
    (error,) = (line for line in printed.splitlines() if line.startswith("error: "))
    assert "groups of this step were lost to failures" in error
    assert RAISED[does] in error
    assert "episode 0000000:toy/train/" in printed
    assert "Traceback" not in printed
    assert "Task was destroyed" not in printed


def test_a_signal_ends_a_run_whose_grader_holds_the_interpreter(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "tests.e2e.test_hostile_code:Hostile", "does": "holds_the_interpreter"}
    settings = toy_settings(tiny_model, steps=2, data=data, evaluation={"enabled": False})
    recipe = write_settings(tmp_path / "recipe.yaml", settings)
    with whet_fork("train", str(recipe), "--folder", str(tmp_path / "run")) as process:
        try:
            line = next(line for line in process.stderr if "the interpreter has been held" in line)
            assert f"{__file__}:" in line
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert "error: a signal arrived, and the interpreter has been held for " in said
    assert f"Resume with: whet resume {tmp_path / 'run'}" in said


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("blocks", "an environment blocks at "),
        pytest.param("does_not_listen", "an environment or the generator hangs", marks=slow),
        pytest.param("computes_for_ever", "an environment blocks at ", marks=slow),
        pytest.param("blocks_a_helper_thread", "an environment or the generator hangs", marks=slow),
    ],
)
def test_a_grader_that_never_returns_meets_the_deadline_and_the_process_ends(
    does: str, says: str, tiny_model: Path, tmp_path: Path
) -> None:
    code, printed = train(tmp_path, tiny_model, does, deadline=10.0)
    assert code == 1
    assert "error: group 0000000:toy/train/" in printed
    assert "no episode had a reply or ended within rollouts.deadline = 10 s; " + says in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_copies_of_the_run_that_a_grader_makes_end_and_the_run_continues(tiny_model: Path, tmp_path: Path) -> None:
    code, printed = train(tmp_path, tiny_model, "forks")
    assert code == 0, printed
    assert printed.count("a fork of the run, made by user code with os.fork, ends here") == 24
    assert printed.count("finished: ") == 1


@slow
def test_an_exit_that_a_grader_leaves_to_the_event_loop_ends_nothing(tiny_model: Path, tmp_path: Path) -> None:
    code, printed = train(tmp_path, tiny_model, "leaves_an_exit_behind")
    assert code == 0, printed
    assert "user code in the background raised SystemExit(0)" in printed


@pytest.mark.parametrize("correct", [5.0, -0.1, 1.0000001])
def test_an_accuracy_beyond_one_is_an_error_and_no_number(correct: float, tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Hostile(does="nothing", correct=correct), max_failed=0.0) as rollouts:
            with pytest.raises(WhetError, match=rf"score correct .* is {correct:g}; it must be from 0 to 1"):
                await rollouts.next_groups()

    asyncio.run(go())
