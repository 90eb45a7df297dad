"""Exports of models that read images: transformers, where whet can't be imported, gives the learner's numbers by the
code of the model card."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.without_whet import run_without_whet
from tests.grids import taking_turns
from tests.models.test_image_reward_models import ALL, VALUES, pairs, scores_of_transformers
from tests.models.test_images import RED, renderer_of
from tests.rows import rows_recipe, write_rows
from tests.tiny_vision import Family, asked, picture, save_tiny_vision
from whet.base.files import load_tensors
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.export import export
from whet.checkpoint.store import CheckpointStore
from whet.core.batch import Batch
from whet.core.types import Message
from whet.learner.model import build_whole
from whet.learner.state import load_weights
from whet.losses.reward_model import sequence_scores
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config
from whet.models.reward_model import RewardModel
from whet.models.sequence_classifier import classifier_class
from whet.run import run

COLORS = ("red", "blue", "green", "black")
# Of the other families, which export in the same ways, the learner's scores are a fast test.
DIFFERENT: tuple[Family, ...] = ("qwen3_vl_moe", "gemma3")
WITH_PROCESSOR: tuple[Family, ...] = ("idefics3", "gemma3")
"""Families whose whole processor transformers loads without torchvision."""


def learned(model: Path, folder: Path, algorithm: str = "reward_model", **settings: Any) -> Path:
    """Return a run of two steps on pairs with pictures."""
    rows = [
        {"prompt": "Which colour?", "image": picture(color, 20 + index), "chosen": color, "rejected": "none"}
        for index, color in enumerate(COLORS * 4)
    ]
    recipe = rows_recipe(
        model, "preference", write_rows(folder / "rows.jsonl", rows), {"type": algorithm}, steps=2,
        optimizer={"lr": 0.01}, checkpoints={"every": 2},
    )  # fmt: skip
    recipe = recipe.model_copy(update={"model": ModelConfig(path=str(model), **{"vision": "trained"} | settings)})
    return run.start(recipe, folder / "run")


def scores_of_learner(model: Path, run: Path) -> list[float]:
    """Return the scores of ``pairs`` by the last checkpoint of a run that trained all weights."""
    module = build_whole(ModelConfig(path=str(model), vision="trained"), "float32", False, True, 0, torch.device("cpu"))
    tensors = load_weights(CheckpointStore(run / "checkpoints", CheckpointConfig()).load().folder / "reward_model")
    assert module.value_head is not None
    module.value_head.linear.weight.data.copy_(tensors.pop("value_head.linear.weight"))
    problems = module.model.load_state_dict(tensors, strict=False)
    assert not problems.unexpected_keys
    assert set(problems.missing_keys) <= {"lm_head.weight"}
    batch = Batch.from_groups(pairs(model))
    with torch.no_grad():
        found: list[float] = sequence_scores(module.eval()(batch, VALUES), batch).tolist()
    return found


@pytest.mark.parametrize("family", taking_turns(ALL, DIFFERENT))
def test_an_exported_reward_model_of_images_scores_as_the_learner(tmp_path: Path, family: Family) -> None:
    save_tiny_vision(tmp_path / "model", family)
    folder = learned(tmp_path / "model", tmp_path)
    wanted = scores_of_learner(tmp_path / "model", folder)
    assert torch.tensor(wanted).std() > 1e-3
    exported = export(folder, tmp_path / "out").path
    config = load_model_config(ModelConfig(path=str(exported)))
    theirs, info = classifier_class(config).from_pretrained(exported, output_loading_info=True, dtype=torch.float64)
    assert not any(info.values())
    if getattr(config.get_text_config(), "num_experts", None):
        theirs.set_experts_implementation("eager")
        layers = {name: part.shape for name, part in load_tensors(exported / "model.safetensors").items()}
        # As in published files, which vLLM reads.
        assert {shape for name, shape in layers.items() if name.endswith("experts.down_proj")} == {(4, 96, 32)}
    groups = pairs(exported)
    with torch.no_grad():
        found = [float(score) for group in groups for score in scores_of_transformers(exported, theirs.eval(), group)]
    assert found == pytest.approx(wanted, abs=1e-4)
    served = RewardModel(str(exported), None, "cpu", "float32", 1)
    talks = [{"messages": branch.messages, "tools": None} for group in groups for branch in group.trajectories]
    assert served.scores(talks) == pytest.approx(wanted, abs=1e-4)
    assert [score for talk in talks for score in served.scores([talk])] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_PROCESSOR)
def test_the_code_of_the_card_scores_a_picture_without_whet(tmp_path: Path, family: Family) -> None:
    save_tiny_vision(tmp_path / "model", family)
    folder = learned(tmp_path / "model", tmp_path)
    exported = export(folder, tmp_path / "out").path
    (tmp_path / "picture.png").write_bytes(base64.b64decode(RED.partition(",")[2]))
    code = of_card(exported)
    assert ("GenericForSequenceClassification" in code) == (family == "idefics3")
    score = run_without_whet(f"{code}\nprint(json.dumps(score.item()))", folder=tmp_path)
    talk: list[Message] = [asked(RED, text="How many circles?"), {"role": "assistant", "content": "Two."}]
    served = RewardModel(str(exported), None, "cpu", "float32", 1)
    assert served.scores([{"messages": talk, "tools": None}]) == pytest.approx([score], abs=1e-4)


def of_card(exported: Path) -> str:
    """Return the code of a model card that loads the model of this folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    return str(code).replace("path/to/this/folder", str(exported))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, False])
def test_a_policy_that_reads_images_is_loaded_by_the_code_of_its_card(tmp_path: Path, adapter: bool) -> None:
    save_tiny_vision(tmp_path / "model")
    folder = learned(tmp_path / "model", tmp_path, "dpo", vision="frozen", lora={"rank": 2})
    whole, part = export(folder, tmp_path / "whole").path, tmp_path / "part"
    exported = export(folder, part, adapter_only=True).path if adapter else whole
    prompt = renderer_of(whole).render_prompt([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    code = f"import torch\nprint(json.dumps(model(torch.tensor([{prompt}])).logits[0, -1].tolist()))"
    found = run_without_whet(f"{of_card(exported)}\n{code}", folder=tmp_path)
    model = build_whole(ModelConfig(path=str(whole), vision="frozen"), "float32", False, False, 0, torch.device("cpu"))
    loaded: Any = model.model.eval()
    loaded.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert found == pytest.approx(loaded(torch.tensor([prompt])).logits[0, -1].tolist(), abs=1e-4)


def test_adapters_and_a_frozen_tower_are_merged_into_a_reward_model(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "model", "qwen3_vl")
    folder = learned(tmp_path / "model", tmp_path, vision="frozen", lora={"rank": 2})
    exported = export(folder, tmp_path / "out").path
    names = load_tensors(exported / "model.safetensors")
    assert "score.weight" in names
    assert not any("lora" in name or "lm_head" in name for name in names)
    talk: list[Message] = [asked(RED), {"role": "assistant", "content": "red"}]
    (score,) = RewardModel(str(exported), None, "cpu", "float32", 1).scores([{"messages": talk, "tools": None}])
    assert isinstance(score, float)
