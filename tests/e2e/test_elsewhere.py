"""Whole runs on a device that is not the CPU and refuses to mix with it: see ``tests.elsewhere``."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.forks import finished, program_fork
from tests.rows import pairs, rows_recipe, write_rows
from tests.toy import toy_recipe, write_recipe
from whet.run import run
from whet.run.recipe import Recipe

SHORT: dict[str, Any] = {"steps": 2, "checkpoints": {"every": 0}}
NUMBERS = ("loss", "gradient_norm", "reward", "kl", "critic/loss", "evaluation/loss", "evaluation/reward")


def preferences(model: Path, folder: Path) -> Recipe:
    """Reads the log-probs of a reference, and trains adapters."""
    rows = write_rows(folder / "pairs.jsonl", pairs(20))
    adapted = {"path": str(model), "lora": {"rank": 4}}
    return rows_recipe(model, "preference", rows, {"type": "dpo"}, model=adapted, **SHORT)


def policy_gradients(model: Path, folder: Path) -> Recipe:
    """Samples, publishes weights, scores for a KL penalty and for a critic, and evaluates."""
    algorithm = {"type": "ppo", "minibatches": 2, "advantage": {"type": "gae", "kl": 0.1}}
    return toy_recipe(model, algorithm=algorithm, **SHORT)


@pytest.mark.parametrize("recipe_of", [preferences, policy_gradients])
def test_a_run_on_another_device_mixes_no_devices_and_learns_the_same(
    recipe_of: Any, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_model, tmp_path)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    code = "from tests.elsewhere import main; main()"
    ended = finished(program_fork(code, str(path), str(tmp_path / "there")))
    assert ended.returncode == 0, ended.stderr[-2000:]
    here = run.start(recipe, tmp_path / "here")
    for kind in ("train", "evaluation"):
        expected, found = lines(here, kind), lines(tmp_path / "there", kind)
        assert len(expected) == len(found) > 0
        compared = [{name: line[name] for name in NUMBERS if name in line} for line in (*expected, *found)]
        assert any(compared)
        assert compared[len(expected) :] == [pytest.approx(line, rel=1e-3) for line in compared[: len(expected)]]
