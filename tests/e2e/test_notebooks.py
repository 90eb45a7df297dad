"""A notebook's cell that trains: an interrupt ends it after the step, with the run saved and a line that says how to
go on. A cell is code that runs inside an event loop, in the main thread."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_stop_signals import recipe, steps_done
from tests.toy import write_recipe

CELL = """
import asyncio, sys, whet

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


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupted_cell_ends_within_a_step_and_says_how_to_go_on(
    begun: bool, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    file = write_recipe(tmp_path / "recipe.yaml", recipe(tiny_model, steps=1000))
    with subprocess.Popen(
        [sys.executable, "-c", CELL, str(file), str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            until = time.monotonic() + 120
            while not (steps_done(folder) if begun else folder.exists()) and time.monotonic() < until:
                assert process.poll() is None
                time.sleep(0.02)
            done = steps_done(folder)
            process.send_signal(signal.SIGINT)
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
