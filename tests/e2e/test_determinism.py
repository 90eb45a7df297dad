"""The same seed gives the same bytes, regardless of the number of episodes in parallel."""

from pathlib import Path
from typing import Any

import pytest

from tests.toy import toy_recipe
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.run import run


def finished(tiny_model: Path, folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], bytes]:
    run.start(toy_recipe(tiny_model, steps=3, **changes), folder)
    lines = [without_time(line) for line in read_metrics(folder / "metrics.jsonl")]
    return lines, (folder / "checkpoints" / "step-000003" / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def usual(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], bytes]:
    return finished(tiny_model, tmp_path_factory.mktemp("usual") / "run")


def test_the_same_seed_gives_the_same_bytes(usual: Any, tiny_model: Path, tmp_path: Path) -> None:
    assert finished(tiny_model, tmp_path / "run") == usual


def test_another_seed_gives_other_rollouts(usual: Any, tiny_model: Path, tmp_path: Path) -> None:
    assert finished(tiny_model, tmp_path / "run", seed=1)[0] != usual[0]


def test_in_step_the_result_does_not_depend_on_concurrency(usual: Any, tiny_model: Path, tmp_path: Path) -> None:
    narrow = finished(
        tiny_model, tmp_path / "narrow", rollouts={"concurrency": 3}, generator={"max_batch": 2, "prefix_tokens": 0}
    )
    assert narrow == usual


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"model": {"lora": {"rank": 2}}, "rollouts": {"concurrency": 3}}, marks=pytest.mark.slow)],
    ids=["whole weights", "lora"],
)
def test_guessed_tokens_change_no_number_of_a_run(
    changes: dict[str, Any], usual: Any, tiny_model: Path, tmp_path: Path
) -> None:
    plain = finished(tiny_model, tmp_path / "plain", **changes) if changes else usual
    guesses = {"speculative": {"type": "ngram", "shortest": 1}, "max_batch": 5}
    assert finished(tiny_model, tmp_path / "guessed", generator=guesses, **changes) == plain
    lines = read_metrics(tmp_path / "guessed" / "metrics.jsonl")
    assert sum(line.get("time/generator/guessed_tokens", 0) for line in lines) > 0
