"""README's Python examples as scripts: they run, and so do the commands that a run prints, in other processes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import toy_recipe, write_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(import whet\n.*?)```", README, re.DOTALL)
LOOP = re.search(r"```python\n(import asyncio\n.*?)```", README, re.DOTALL)

OWN_PARTS = """
import whet
from tests.toy import Lowercase
from whet.losses.composite import PolicyLoss
from whet.rollouts.rewards import Reward
from whet.core.types import Episode


class Mine(Lowercase):
    async def grade(self, task, answer):
        print("graded in", __name__)  # as users do who look for a mistake
        return await super().grade(task, answer)


class Half(Reward):
    def value(self, episode: Episode) -> float:
        return episode.reward / 2


class Own(PolicyLoss):
    pass


if __name__ == "__main__":
    algorithm = {"type": "grpo", "group_size": 4, "loss": Own()}
    whet.start("toy.yaml", "cluster=processes", folder="run", data=Mine(), rewards=Half(), algorithm=algorithm)
"""


def run(*words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_and_the_commands_that_it_prints(tmp_path: Path, tiny_model: Path) -> None:
    assert EXAMPLE is not None
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1, sinks=["console", "jsonl"]))
    shown = EXAMPLE[1].replace('"quickstart", "steps=10"', '"toy.yaml"')
    assert '"toy.yaml"' in shown
    (tmp_path / "shout.py").write_text(shown)
    printed = run("shout.py", cwd=tmp_path)
    report = Path(printed.splitlines()[-1])
    assert (tmp_path / report).is_file()
    commands = dict(re.findall(r"^  (resume|evaluate|view|export) +whet (.*)$", printed, re.MULTILINE))
    assert list(commands) == ["resume", "evaluate", "view", "export"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, words in commands.items():
        said = run("-m", "whet", *shlex.split(words), cwd=tmp_path)
        assert {"resume": "2 steps", "evaluate": "accuracy", "view": "Name", "export": "export"}[name] in said, said
    run("-m", "whet", "eval", str(tmp_path / report.parent), cwd=elsewhere)


@pytest.mark.slow
def test_the_loop_of_the_readme_runs(tmp_path: Path, tiny_model: Path) -> None:
    assert LOOP is not None
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, sinks=["jsonl"]))
    shown = LOOP[1].replace('"quickstart"', '"toy.yaml"').replace("range(1, 11)", "range(1, 3)")
    assert '"toy.yaml"' in shown
    (tmp_path / "loop.py").write_text(shown)
    rewards = [float(line) for line in run("loop.py", cwd=tmp_path).splitlines()[-2:]]
    assert all(0 <= reward <= 1 for reward in rewards)


@pytest.mark.slow
def test_parts_of_a_script_are_found_by_workers_and_later_commands(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))
    (tmp_path / "parts.py").write_text(OWN_PARTS)
    run("parts.py", cwd=tmp_path)
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert all(f"{tmp_path / 'parts.py'}:{name}" in recipe for name in ("Mine", "Half", "Own")), recipe
    assert "2 steps" in run("-m", "whet", "resume", "run", "steps=2", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("readers", ["2>&1 | head -1", "2>&1 | true", ">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_run_whose_output_has_no_reader_any_more_goes_to_its_end(
    tmp_path: Path, tiny_model: Path, readers: str
) -> None:
    """With warnings, and with an environment that prints."""
    settings = toy_recipe(
        tiny_model, steps=2, sinks=["console", "jsonl"], checkpoints={"best_metric": "nothing", "every": 2}
    )
    write_recipe(tmp_path / "toy.yaml", settings)
    (tmp_path / "parts.py").write_text(OWN_PARTS)
    words = "-m whet train toy.yaml --folder run data=parts:Mine"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = f"{shlex.quote(sys.executable)} {words} {readers}"
    subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, timeout=300, check=False)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir(), list((tmp_path / "run").rglob("*"))
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "error.log").exists()
