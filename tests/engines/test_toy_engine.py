"""The engine that docs/extending.md shows: it keeps the contract, and a recipe trains with it."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine_contract import EngineContract
from tests.engines.toy_engine import OpenToy, ToyConfig, ToyEngine
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, RefitError
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run
from whet.run.recipe import Recipe

TOY = {"type": "tests.engines.toy_engine:ToyConfig"}


def recipe(model: Path, **changes: Any) -> Recipe:
    settings = {"steps": 2, "sampling": {"max_new_tokens": 4}, "evaluation": {"limit": 2}, "generator": TOY}
    return toy_recipe(model, **settings | changes)


class TestContract(EngineContract):
    @pytest.fixture
    def generator(self) -> ToyEngine:
        model = tiny_llama(initializer_range=0.3)
        engine = ToyEngine(ToyConfig(dtype="float32", max_context=512), model.config, tiny_tokenizer())
        engine.model, engine.complete = model.eval(), True
        return engine


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_recipe_trains_with_it_and_every_refit_is_proven(
    tiny_model: Path, tmp_path: Path, max_staleness: int
) -> None:
    rollouts = {"max_staleness": max_staleness}
    folder = run.start(recipe(tiny_model, rollouts=rollouts), tmp_path / "run")
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train" and line["step"]]
    assert len(steps) == 2
    assert all(0 <= line["refit/probe_mean"] < 1e-5 for line in steps)
    assert all(line["mismatch/token_mult_prob_error"] < 1.001 for line in steps if not max_staleness)
    assert all(line["time/generator/prompt_tokens"] > 0 for line in steps)


class NothingBuilt(ToyConfig):
    def build_replica(self, model: Any, tokenizer: Any, deployment: Any) -> Any:
        return None


def test_settings_that_build_no_engine_are_named(tiny_model: Path, tmp_path: Path) -> None:
    nothing = {"type": f"{__name__}:NothingBuilt"}
    with pytest.raises(ConfigError, match=r"NothingBuilt.build_replica \(.*\) must return an engine .* not a NoneType"):
        run.start(recipe(tiny_model, generator=nothing), tmp_path / "run")


def test_a_weight_that_it_loses_stops_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, name = OpenToy.load, "model.norm.weight"

    def forgetful(self: OpenToy, named: Any) -> None:
        load(self, [(other, tensor + (other == name)) for other, tensor in named])

    monkeypatch.setattr(OpenToy, "load", forgetful)
    with pytest.raises(RefitError, match=rf"1 of \d+ tensors differ, the first {name}"):
        run.start(recipe(tiny_model), tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("generator.replicas", {"generator": TOY | {"replicas": 2}}),
        ("devices.placement", {"devices": {"placement": "colocated"}}),
        ("rollouts.partial", {"rollouts": {"partial": True, "max_staleness": 1, "order": "ready"}}),
    ],
)
def test_settings_that_need_an_engine_that_pauses_are_refused_when_the_recipe_is_read(
    tiny_model: Path, setting: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} needs an engine that pauses, and ToyConfig's does not"):
        recipe(tiny_model, **changes)
