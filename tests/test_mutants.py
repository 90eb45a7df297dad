"""The tests of losses and advantages notice when these are broken: a mutant an hour, a few of each file in the
slow tests, and all of them when asked."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants import mutants
from tests.mutate import EQUIVALENT, ROOT, TESTS


def mutate(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.mutate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


@pytest.mark.timeout(1800)
def test_the_mutant_of_this_hour_is_noticed() -> None:
    hour = int(time.time() // 3600)
    done = mutate("--sample", "1", "--seed", str(hour), timeout=1500)
    assert done.returncode == 0, f"seed {hour}\n{done.stdout}\n{done.stderr}"
    assert " killed, 0 survived" in done.stdout


def test_mutants_of_a_file_can_be_listed() -> None:
    listed = mutate("--list", "losses/kl", timeout=300).stdout
    assert "value = -e" in listed
    assert "'k3' -> 'k3?'" in listed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_was_killed_is_remembered(tmp_path: Path) -> None:
    killed = tmp_path / "killed.txt"
    first = mutate("losses/value", "--killed", str(killed), timeout=1500)
    assert "SURVIVED" not in first.stdout
    remembered = killed.read_text()
    assert remembered
    again = mutate("losses/value", "--killed", str(killed), timeout=300)
    assert killed.read_text() == remembered
    assert again.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]


@pytest.mark.slow
def test_every_equivalent_mutant_is_one() -> None:
    files = {name.partition(": ")[0] for name in EQUIVALENT}
    assert files <= TESTS.keys()
    assert EQUIVALENT.keys() <= {mutant.name for path in files for mutant in mutants(path)}


def test_a_new_loss_is_broken_without_being_listed() -> None:
    losses = {str(path.relative_to(ROOT)) for path in (ROOT / "whet" / "losses").glob("*.py")}
    assert losses | {"whet/algorithms/grpo.py"} <= TESTS.keys()
    assert [path for path in TESTS if not (ROOT / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", TESTS)
def test_some_mutants_of_each_file_are_noticed(path: str) -> None:
    hour = int(time.time() // 3600)
    done = mutate(path, "--sample", "8", "--seed", str(hour), timeout=1500)
    assert done.returncode == 0, f"seed {hour}\n{done.stdout}\n{done.stderr}"


@pytest.mark.hours
@pytest.mark.timeout(10000)
def test_every_mutant_is_noticed() -> None:
    done = mutate(timeout=9000)
    assert done.returncode == 0, done.stdout + done.stderr
