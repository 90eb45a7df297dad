"""The benchmark of the controller runs, small, and counts every call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_turn_of_every_episode_is_a_call(tmp_path: Path) -> None:
    small = ["--parts", "calls", "--episodes", "16,32", "--replicas", "1,3", "--turns", "2", "--tokens", "4"]
    command = [sys.executable, ROOT / "benchmarks" / "scale.py", *small, "--json", tmp_path / "out.json"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    calls = {label: numbers["calls"] for label, numbers in results.items()}
    assert calls == {f"{n} episodes, {r} replicas": 2 * n for r in (1, 3) for n in (16, 32)}
    assert all(numbers["ms of a processor for each call"] > 0 for numbers in results.values())


@pytest.mark.slow
def test_the_other_parts_are_measured_by_size(tmp_path: Path) -> None:
    parts = ["--parts", "ledger,report,tasks,rows", "--sizes", "20,200"]
    command = [sys.executable, ROOT / "benchmarks" / "scale.py", *parts, "--json", tmp_path / "out.json"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(results) == {f"{part}, {n}" for part in ("ledger", "report", "tasks", "rows") for n in (20, 200)}
    assert results["ledger, 200"]["MB of file"] > 9 * results["ledger, 20"]["MB of file"]
