"""A notebook's cell that trains: an interrupt ends it after the step, with the run saved and a line that says how to
go on. A cell is code that runs inside an event loop, in the main thread."""

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.test_stop_signals import held, passes, recipe, steps_done
from tests.forks import finished, program_fork
from tests.toy import toy_recipe, write_recipe

CELL = """
import asyncio, sys, whet

sys.stdout.reconfigure(line_buffering=True)

async def cell():
    whet.start(sys.argv[1], folder=sys.argv[2])

async def next_cell():
    print("the next cell:", flush=True)

loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(cell())
except KeyboardInterrupt as error:
    print("KeyboardInterrupt:", error, flush=True)
loop.run_until_complete(next_cell())
"""


@pytest.mark.parametrize("begun", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_interrupted_cell_ends_within_a_step_and_reports_the_command_to_resume(
    begun: bool, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    file = write_recipe(tmp_path / "recipe.yaml", recipe(tiny_model, folder if begun else None, steps=1000))
    with program_fork(CELL, str(file), str(folder), merged=True) as process:
        try:
            until = time.monotonic() + 120
            while not (held(folder) if begun else folder).exists() and time.monotonic() < until:
                assert process.poll() is None
                time.sleep(0.02)
            done = steps_done(folder)
            process.send_signal(signal.SIGINT)
            if begun:
                assert any("interrupted: the run saves after this step" in line for line in process.stdout)
                passes(folder).touch()
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    assert "the next cell:" in printed
    if begun:
        assert f"Resume with: whet.resume('{folder}')" in printed
        assert steps_done(folder) <= done + 3
        assert list((folder / "checkpoints").glob("step-*"))
    assert "Traceback" not in printed


OWN_LOOP = """
import asyncio, os, signal, sys, threading, time, whet
from tests.toy import Lowercase

class Slow(Lowercase):
    async def grade(self, task, answer):
        if waits:
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()  # the main thread handles it
            waits.clear()
            await asyncio.sleep(60)
        return await super().grade(task, answer)

waits = [True]

async def cell():
    with whet.open(sys.argv[1], folder=sys.argv[2], data=Slow()) as run:
        before = time.monotonic()
        try:
            run.policy.sample(run.tasks.next(1), n=2)
        except KeyboardInterrupt:
            print("interrupted after less than 30 s:", time.monotonic() - before < 30)
        print("again:", len(run.policy.sample(run.tasks.next(2), n=2)), len(run.source.next_groups()))

asyncio.new_event_loop().run_until_complete(cell())
left = [t for t in threading.enumerate() if t.name.startswith("whet-")]
for thread in left:
    thread.join(60)  # an ending thread may take a moment
print("threads left:", [t.name for t in left if t.is_alive()])
"""


def output_of(program: str, recipe: Path, folder: Path) -> str:
    """Return the standard output of a Python program that runs a recipe in a folder."""
    done = finished(program_fork(program, str(recipe), str(folder)), 240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loop_of_ones_own_in_a_cell_is_interrupted_and_continues(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"rollouts": {"prompts_per_step": 1}, "evaluation": {"enabled": False}}
    file = write_recipe(tmp_path / "recipe.yaml", toy_recipe(tiny_model, steps=1, **settings))
    output = output_of(OWN_LOOP, file, tmp_path / "run")
    assert "interrupted after less than 30 s: True" in output
    assert "again: 2 1" in output
    assert "threads left: []" in output


OPENING = """
import asyncio, os, signal, sys, threading, time, whet
import whet.run.build

async def held(*_):
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    await asyncio.sleep(60)

whet.run.build.build_learner = held  # loading that takes long

async def cell():
    try:
        with whet.open(sys.argv[1], folder=sys.argv[2]):
            print("it was opened")
    except KeyboardInterrupt:
        print("interrupted")

asyncio.new_event_loop().run_until_complete(cell())
left = [t for t in threading.enumerate() if t.name.startswith("whet-")]
for thread in left:
    thread.join(60)  # an ending thread may take a moment
print("threads left:", [t.name for t in left if t.is_alive()])
"""


def test_an_interrupt_while_a_run_is_opened_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", toy_recipe(tiny_model, steps=1))
    output = output_of(OPENING, file, tmp_path / "run")
    assert output.splitlines()[-2:] == ["interrupted", "threads left: []"], output
