"""Frozen adapters of an engine are checked before it starts, and the recipe before that."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frozen_adapters import save_adapter
from tests.tiny import tiny_llama
from tests.toy import toy_recipe, write_recipe
from whet.base.errors import ConfigError
from whet.base.files import load_tensors, save_tensors
from whet.cli.main import main
from whet.config.issues import RecipeError
from whet.engines.adapters import linear_layers, read_adapters
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.models.config import check_models


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def test_an_adapter_is_read_with_its_rank_and_modules(model: Any, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", model, 0, ["q_proj", "down_proj"], rank=3)
    (adapter,) = read_adapters({"judge": str(folder)})
    adapter.check_fits(linear_layers(model.config))
    assert (adapter.name, adapter.folder, adapter.rank) == ("judge", folder, 3)
    layers = range(model.config.num_hidden_layers)
    parts = [f"model.layers.{i}.{part}" for i in layers for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert sorted(adapter.shapes) == sorted(parts)
    assert adapter.shapes["model.layers.0.mlp.down_proj"] == ((3, 128), (64, 3))


def test_a_folder_without_an_adapter_of_the_model_is_refused_in_words(model: Any, tmp_path: Path) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(ConfigError, match=rf"generator\.adapters\.judge = {folder}.*{why}"):
            read_adapters({"judge": str(folder)})[0].check_fits(linear_layers(model.config))

    refused(tmp_path / "nothing", "is not an adapter in peft's form .*No such file")
    refused(save_adapter(tmp_path / "dora", model, 0, ["q_proj"], use_dora=True), "plain LoRA only, without DoRA")
    wide = tiny_llama(hidden_size=96)
    refused(save_adapter(tmp_path / "wide", wide, 0, ["q_proj"]), r"q_proj have the shapes \(4, 96\).* needs \(4, 64\)")
    deep = tiny_llama(num_hidden_layers=3)
    deeper = save_adapter(tmp_path / "deep", deep, 0, ["o_proj"])
    refused(deeper, r"adapts model\.layers\.2\.self_attn\.o_proj, and the model has no such linear layer")
    head = save_adapter(tmp_path / "head", model, 0, ["lm_head"])
    refused(head, r"has the tensor base_model\.model\.lm_head\.base_layer\.weight")
    patterned = save_adapter(tmp_path / "ranks", model, 0, ["q_proj"], rank_pattern={"layers.0.self_attn.q_proj": 2})
    refused(patterned, "must be one number for all modules")
    mixed = save_adapter(tmp_path / "rank", model, 0, ["q_proj"])
    settings = json.loads((mixed / "adapter_config.json").read_text())
    (mixed / "adapter_config.json").write_text(json.dumps(settings | {"r": 5}))
    refused(mixed, r"shapes \(4, 64\) and .* the rank of its config, r = 5, must be the rows of the first")
    more = save_adapter(tmp_path / "more", model, 0, ["q_proj"])
    file = more / "adapter_model.safetensors"
    tensors = dict(load_tensors(file))
    save_tensors(file, tensors | {"base_model.model.model.norm.weight": tensors.popitem()[1]})
    refused(more, "has the tensor base_model.model.model.norm.weight")


def test_a_run_with_a_wrong_folder_is_refused_before_anything_starts(
    model: Any, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = write_recipe(tmp_path / "toy.yaml", recipe_of(tiny_model, "policy:judge", "vllm"))
    stages = tmp_path / "pipeline.yaml"
    stages.write_text("stages:\n  rl: {type: train, recipe: ./toy.yaml}\n")
    folder = str(tmp_path / "run")
    for words in (
        ["train", str(settings), "--folder", folder],
        ["plan", str(settings)],
        ["pipeline", str(stages), "--folder", folder],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "generator.adapters.judge = somewhere is not an adapter in peft's form" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    wide = save_adapter(tmp_path / "wide", model, 0, ["q_proj"], rank=513)
    with pytest.raises(ConfigError, match="has rank 513; vLLM supports up to 512"):
        VllmGeneratorConfig(adapters={"judge": str(wide)}).check_available()
    check_models(VllmGeneratorConfig(adapters={"judge": str(save_adapter(tmp_path / "a", model, 0, ["q_proj"]))}))


def test_adapters_next_to_merged_weights_are_refused_at_reading(tiny_model: Path) -> None:
    for changes in ({}, {"model": {"path": str(tiny_model), "lora": {"rank": 2}}}):
        with pytest.raises(RecipeError, match=r"set model.lora and weights.lora=adapter, or leave generator.adapters"):
            toy_recipe(tiny_model, generator={"type": "vllm", "adapters": {"judge": "somewhere"}}, **changes)


JUDGED = {"type": "judge", "taskset": {"type": "tests.toy:Lowercase"}, "rubric": "Is it lower case?"}


@pytest.mark.parametrize(
    ("judge", "changes", "why"),
    [
        ("policy:base", {}, "which needs generator=vllm, model.lora and weights.lora=adapter"),
        ("policy:base", {"generator": {"type": "vllm"}}, "which needs generator=vllm, model.lora and"),
        ("policy:basis", "vllm", "generator.adapters has no 'basis'. Did you mean 'base'"),
        ("policy:Judges", "vllm", "generator.adapters has no 'Judges'. Did you mean 'judge'"),
    ],
)
def test_a_judge_under_an_adapter_that_there_is_not_is_refused_at_reading(
    tiny_model: Path, judge: str, changes: Any, why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_of(tiny_model, judge, changes)


def test_a_judge_under_an_adapter_is_read(tiny_model: Path) -> None:
    recipe = recipe_of(tiny_model, "policy:judge", "vllm")
    assert recipe.data.judge.adapter == "judge"
    assert recipe_of(tiny_model, "policy:base", "vllm").data.judge.adapter == "base"


def recipe_of(model: Path, judge: str, changes: Any) -> Any:
    if changes == "vllm":
        changes = {
            "generator": {"type": "vllm", "adapters": {"judge": "somewhere"}},
            "model": {"path": str(model), "lora": {"rank": 2}},
            "weights": {"lora": "adapter"},
        }
    return toy_recipe(model, data=JUDGED | {"judge": judge}, **changes)


def test_base_is_no_name_of_an_adapter() -> None:
    with pytest.raises(ValueError, match="'base' is the model without an adapter"):
        VllmGeneratorConfig(adapters={"base": "somewhere"})
