"""A run does not depend on where its workers are."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import VOCAB, tiny_qwen3_moe, tiny_tokenizer
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.run.run import resume, start

_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the training steps, without times."""
    return [without_time(row) for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("cluster", ["processes", pytest.param("ray", marks=[_RAY, pytest.mark.slow])])
def test_a_run_on_another_cluster_gives_the_same_numbers(cluster: str, tiny_model: Path, tmp_path: Path) -> None:
    here = start(toy_recipe(tiny_model, steps=3), tmp_path / "here")
    there = start(toy_recipe(tiny_model, steps=2, cluster={"type": cluster}), tmp_path / "there")
    resume(there, ["steps=3"])
    assert [row["step"] for row in numbers(there)][-3:] == [1, 2, 3]
    assert numbers(there) == numbers(here)


SAME = ("reward/mean", "loss", "gradient_norm", "answer/length_mean", "mismatch/token_mult_prob_error")
LAYOUTS = [{"fsdp": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_learner_is_spread_over_ranks_learns_the_same(
    layout: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    here = numbers(start(toy_recipe(tiny_model, steps=3), tmp_path / "here"))[1:]
    recipe = toy_recipe(tiny_model, steps=2, cluster={"type": "processes"}, parallel=layout)
    there = start(recipe, tmp_path / "there")
    resume(there, ["steps=3"])
    spread = numbers(there)[1:]
    assert len(spread) == len(here) == 3
    for one, other in zip(here, spread, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx({name: one[name] for name in SAME}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"fsdp": 2, "expert": 2}, {"tensor": 2, "expert": 2}])
def test_a_run_of_a_mixture_of_experts_learns_the_same_over_ranks(layout: dict[str, int], tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_qwen3_moe(VOCAB).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    here = numbers(start(toy_recipe(model, steps=2), tmp_path / "here"))[1:]
    recipe = toy_recipe(model, steps=2, cluster={"type": "processes"}, parallel=layout)
    spread = numbers(start(recipe, tmp_path / "there"))[1:]
    assert len(spread) == len(here) == 2
    for one, other in zip(here, spread, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx({name: one[name] for name in SAME}, rel=1e-4)


@_RAY
@pytest.mark.slow
def test_a_run_on_ray_whose_learner_is_spread_over_ranks_learns_the_same(tiny_model: Path, tmp_path: Path) -> None:
    here = numbers(start(toy_recipe(tiny_model, steps=2), tmp_path / "here"))[1:]
    recipe = toy_recipe(tiny_model, steps=2, cluster={"type": "ray"}, parallel={"fsdp": 2})
    spread = numbers(start(recipe, tmp_path / "there"))[1:]
    for one, other in zip(here, spread, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx({name: one[name] for name in SAME}, rel=1e-4)


def test_many_ranks_without_processes_are_refused_before_anything_starts(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel needs 2 ranks.*cluster=processes"):
        toy_recipe(tiny_model, parallel={"fsdp": 2})
