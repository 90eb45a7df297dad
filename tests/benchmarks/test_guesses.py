"""The benchmark of guessed tokens runs, small, and counts what was guessed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_guesses_save_steps_and_none_are_made_where_no_rows_are_spare(tiny_model: Path, tmp_path: Path) -> None:
    small = ["--model", tiny_model, "--flight", "1,16", "--least", "2", "--new-tokens", "40", "--rounds", "1"]
    command = [sys.executable, ROOT / "benchmarks" / "guesses.py", *small, "--json", tmp_path / "out.json"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(results) == [f"{n} in flight, {how}" for n in (1, 16) for how in ("temperature 1", "greedy")]
    few = results["1 in flight, greedy"]
    assert 0 < few["kept"] <= few["guessed"]
    assert few["steps with guesses"] == few["steps without"] - few["kept"]
    many = results["16 in flight, greedy"]
    assert many["tokens"] <= 16 * 40
    assert many["steps with guesses"] <= many["steps without"]
