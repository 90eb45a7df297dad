"""Composed rewards as a recipe chooses them, in a run."""

from pathlib import Path

import pytest

from tests.rollouts.test_rewards import episode
from tests.toy import read_settings, toy_recipe, toy_settings
from whet.base.errors import ConfigError
from whet.run import run


def test_a_recipe_composes_rewards(tmp_path: Path) -> None:
    parts = {"task": {"type": "score"}, "brevity": {"type": "length", "free": 10, "limit": 20, "weight": -0.5}}
    recipe = read_settings(toy_settings(tmp_path, rewards={"type": "sum", "of": parts}))
    assert recipe.rewards is not None
    assert recipe.rewards(episode(tokens=15)) == pytest.approx(0.75)


def test_a_run_ends_at_the_first_episodes_with_the_names_that_there_are(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"rewards": {"type": "score", "name": "corect"}, "evaluation": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"no score 'corect', only reward, correct\. Did you mean 'correct'"):
        run.start(toy_recipe(tiny_model, steps=1, **changes), tmp_path / "run")
    assert "reward/mean" not in (tmp_path / "run" / "metrics.jsonl").read_text()
