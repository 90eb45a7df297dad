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
    small = ["--episodes", "16,32", "--replicas", "1,3", "--turns", "2", "--tokens", "4"]
    command = [sys.executable, ROOT / "benchmarks" / "scale.py", *small, "--json", tmp_path / "out.json"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    calls = {label: numbers["calls"] for label, numbers in results.items()}
    assert calls == {f"{n} episodes, {r} replicas": 2 * n for r in (1, 3) for n in (16, 32)}
    assert all(numbers["ms of a processor for each call"] > 0 for numbers in results.values())
