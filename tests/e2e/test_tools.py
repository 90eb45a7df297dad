"""A whole run over tasks with tools; and one whose chat template doesn't know tools stops with what to do."""

import json
from pathlib import Path

import pytest

from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.run import run
from whet.run.recipe import Recipe


def recipe(tiny_model: Path, tools_as_text: bool) -> Recipe:
    return toy_recipe(
        tiny_model,
        steps=2,
        tools_as_text=tools_as_text,
        data={"type": "calculator", "train_size": 12, "test_size": 4},
        generator={"max_context": 1400},
        sampling={"max_new_tokens": 8, "max_turns": 2, "max_prompt_tokens": 1200, "max_observation_tokens": 64},
    )


def test_a_run_over_tasks_with_tools(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(recipe(tiny_model, tools_as_text=True), tmp_path / "run")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("tool_calls" in key for line in steps for key in line)  # the counts are scores of the episodes


def test_a_template_without_tools_stops_the_run(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves out the tools; set tools_as_text: true"):
        run.start(recipe(tiny_model, tools_as_text=False), tmp_path / "run")
