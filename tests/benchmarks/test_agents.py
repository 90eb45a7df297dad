"""The benchmark of agents runs, small, and measures what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def measured(part: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return the output of a small run of one part."""
    command = [sys.executable, ROOT / "benchmarks" / "agents.py", "--parts", part, "--small"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--json", folder / "out.json"], check=True, env=environment, timeout=120)
    found: dict[str, dict[str, float]] = json.loads((folder / "out.json").read_text())["results"]
    return found


@pytest.mark.slow
def test_sharing_computes_each_token_of_a_prompt_once_and_without_it_every_prompt_is_computed(tmp_path: Path) -> None:
    shared, anew = measured("generator", tmp_path).values()
    assert shared["laid out"] == 8 * (200 + 216 + 232)
    assert shared["computed"] == 200 + 8 * 2 * 16
    assert anew["computed"] == anew["laid out"] == shared["laid out"]


@pytest.mark.slow
def test_the_learner_computes_once_what_lines_have_in_common(tmp_path: Path) -> None:
    shared, rows, branched, alone = measured("learner", tmp_path).values()
    assert (shared["computed"], rows["computed"]) == (200 + 8 * 40, 8 * 240)
    assert (branched["computed"], alone["computed"]) == (200 + 8 * 40, 8 * 3 * 200 + 8 * 40)
    assert rows["computed"] == rows["laid out"] == shared["laid out"]
    assert alone["computed"] == alone["laid out"] == branched["laid out"]


@pytest.mark.slow
@pytest.mark.model
def test_episodes_wait_for_their_own_tools_only(tmp_path: Path) -> None:
    slow, quick = measured("tools", tmp_path).values()
    assert slow["replies"] == quick["replies"] == 8 * 4
    assert slow["share of episodes' time in tools"] > quick["share of episodes' time in tools"]
    assert slow["seconds"] < slow["seconds of the slowest episode's tools"] + quick["seconds"] + 10


@pytest.mark.slow
def test_a_session_with_summaries_is_a_branch_for_each(tmp_path: Path) -> None:
    [found] = measured("sessions", tmp_path).values()
    assert found["branches"] == 3
    assert found["milliseconds of processors for a call"] > 0
    assert 0 < found["MiB held at the end"] < 50
