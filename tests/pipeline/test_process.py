"""A pipeline that is killed or asked to end, while a stage is a real process, continues where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rows import texts, write_rows
from whet.base.errors import WhetError
from whet.metrics.sinks.jsonl import read_metrics
from whet.pipeline.commands import Command
from whet.pipeline.process import run_command

ROOT = Path(__file__).parents[2]
STEPS = 300
PIPELINE = """\
stages:
  base: {type: random_model}
  sft:
    type: train
    recipe: sft
    model: base.model
    data: ROWS
    settings:
      steps: STEPS
      data: {batch_size: 4}
      evaluation: {every: 0}
      checkpoints: {every: 10}
      sinks: [jsonl]
"""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "whet", "pipeline", str(folder / "p.yaml"), "--folder", str(folder / "out")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> list[psutil.Process]:
    """Wait until the run has done a step; return the processes below the pipeline's."""
    metrics, deadline = folder / "out/sft/metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "the run does not get to this step"
        time.sleep(0.02)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
def test_a_kill_and_signals_lose_no_step_and_count_none_twice(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", texts(40))
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("ROWS", str(rows)).replace("STEPS", str(STEPS)))
    first = start(tmp_path)
    below = wait_for_step(first, tmp_path, 15)
    first.kill()
    first.wait()
    assert below
    assert not psutil.wait_procs(below, timeout=60)[1], "the kernel ends the stage with the pipeline"
    for number, code, step in ((signal.SIGTERM, 143, 40), (signal.SIGINT, 130, 80)):
        process = start(tmp_path)
        wait_for_step(process, tmp_path, step)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert f"Continue with: whet pipeline {tmp_path}/p.yaml --folder {tmp_path}/out" in err
        assert not (json.loads((tmp_path / "out/pipeline.json").read_text()))["stages"]["sft"]["finished"]
    last = start(tmp_path)
    _, err = last.communicate(timeout=240)
    assert last.returncode == 0, err
    steps = [line["step"] for line in read_metrics(tmp_path / "out/sft/metrics.jsonl") if line.get("loss") is not None]
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert not (tmp_path / "out/older").exists()


def test_a_stage_that_fails_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"python -m whet\.pipeline\.make rows .* failed with exit code 1"):
        run_command(Command(("rows", str(tmp_path), str(tmp_path / "rows.jsonl"), "pairs"), "whet.pipeline.make"))
    assert not (tmp_path / "rows.jsonl").exists()
