"""A run over two environments: each is measured, and a resumed run is the same to the bit."""

from pathlib import Path
from typing import Any

from tests.toy import toy_recipe
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.processes.compute import run_computing
from whet.run import run
from whet.run.evaluate_model import evaluate_model
from whet.run.recipe import Recipe
from whet.show.facts import Summary


def blended(model: Path, **changes: Any) -> Recipe:
    parts = {
        "short": {"taskset": "tests.toy:Lowercase", "weight": 2, "sampling": {"max_new_tokens": 4}},
        "long": {"taskset": {"type": "tests.toy:Lowercase", "size": 5}, "curriculum": "pass_rate"},
    }
    held_out = {"other": {"data": {"type": "tests.toy:Lowercase", "size": 6}, "limit": 3}}
    evaluation = {"sets": held_out, "limit": 4}
    return toy_recipe(model, data={"type": "blend", "of": parts}, evaluation=evaluation, **changes)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [without_time(line) for line in read_metrics(folder / "metrics.jsonl")]


def test_a_blend_trains_is_measured_by_environment_and_resumes_to_the_same_bits(
    tiny_model: Path, tmp_path: Path
) -> None:
    straight = run.start(blended(tiny_model, steps=3), tmp_path / "straight")
    stopped = run.start(blended(tiny_model, steps=2, checkpoints={"every": 1}), tmp_path / "stopped")
    run.resume(stopped, ["steps=3"])
    found = lines(straight)
    trained = [line for line in found if line["kind"] == "train" and "reward/mean" in line]
    assert [(line["env/short/groups"], line["env/long/groups"]) for line in trained] == [(2, 1)] * 3
    assert all(line["env/short/length"] <= 4 < line["env/long/length"] for line in trained)
    assert [line for line in lines(stopped) if line["kind"] == "train"][-1] == trained[-1]

    first = next(line for line in found if line["kind"] == "evaluation")
    sizes = {name: first[f"evaluation/{name}/n"] for name in ("short", "long", "other")}
    assert sizes == {"short": 4, "long": 4, "other": 3}
    assert first["evaluation/n"] == 8
    assert first["evaluation/short/length_mean"] <= 4
    assert first["evaluation/accuracy"] == (first["evaluation/short/accuracy"] + first["evaluation/long/accuracy"]) / 2
    assert list(Summary.of(found).sets) == ["short", "long", "other"]


def test_a_blend_is_evaluated_by_hand_as_in_a_run(tiny_model: Path) -> None:
    report = run_computing(evaluate_model(blended(tiny_model), limit=2))
    assert (report.n, {name: one.n for name, one in report.sets.items()}) == (4, {"short": 2, "long": 2, "other": 2})
