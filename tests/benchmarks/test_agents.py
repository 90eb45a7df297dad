"""The benchmark of agents runs, small, and measures what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sharing_computes_each_token_of_a_prompt_once_and_without_it_every_prompt_is_computed(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "agents.py", "--parts", "generator", "--small"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--json", tmp_path / "out.json"], check=True, env=environment, timeout=120)
    shared, anew = json.loads((tmp_path / "out.json").read_text())["results"].values()
    assert shared["laid out"] == 8 * (200 + 216 + 232)
    assert shared["computed"] == 200 + 8 * 2 * 16
    assert anew["computed"] == anew["laid out"] == shared["laid out"]
