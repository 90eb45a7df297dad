"""Whole runs with adapters on a model in 4 bits: SFT, DPO and GRPO learn, resume to the same bits, and are exported
with the values that they were trained with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.without_whet import run_without_whet
from tests.e2e.test_learning import lines
from tests.e2e.test_resume import killed_and_resumed, metrics
from tests.forks import whet
from tests.rows import pairs, rows_recipe, texts, write_rows
from tests.toy import toy_recipe, write_recipe
from whet.checkpoint.export import export
from whet.checkpoint.policy import load_policy
from whet.checkpoint.store import CheckpointStore
from whet.models.config import LoraSettings, ModelConfig
from whet.run import run
from whet.weights.named_weights import ModelWeights

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'whet[qlora]'")
LORA = {"rank": 8, "alpha": 32.0, "quantize": "nf4"}
TOKENS = [[5, 17, 99, 3, 250, 41, 7]]
# Prints the logits of a model that transformers quantized, without and with an adapter.
READER = """
import peft, torch, transformers

bits = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
model = peft.AutoPeftModelForCausalLM.from_pretrained(
    sys.argv[1][1:-1], dtype=torch.float32, quantization_config=bits, device_map={"": "cpu"}
)
model.train()  # on some CPUs bitsandbytes rounds scales in eval mode
with torch.no_grad():
    print(json.dumps(model(torch.tensor(json.loads(sys.argv[2]))).logits.tolist()))
"""


def recipe_of(algorithm: str, tiny_model: Path, folder: Path, **changes: Any) -> Any:
    lora = {"model": {"path": str(tiny_model), "lora": LORA}, "optimizer": {"lr": 3e-3}}
    if algorithm == "grpo":
        return toy_recipe(tiny_model, **lora, **changes)
    rows = {"sft": ("supervised", texts(40)), "dpo": ("preference", pairs(40))}
    kind, written = rows[algorithm]
    path = write_rows(folder / "rows.jsonl", written)
    return rows_recipe(tiny_model, kind, path, {"type": algorithm}, **lora, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_killed_run_on_a_quantized_model_resumes_to_the_same_bits(
    tiny_model: Path, tmp_path: Path, algorithm: str
) -> None:
    changes = {"steps": 5, "checkpoints": {"every": 2}, "evaluation": {"every": 2}}
    recipe = write_recipe(tmp_path / "toy.yaml", recipe_of(algorithm, tiny_model, tmp_path, **changes))
    alone = tmp_path / "alone"
    done = whet("train", str(recipe), "--folder", str(alone))
    assert done.returncode == 0, done.stderr
    assert killed_and_resumed(recipe, tmp_path / "killed", "step.updated:4") == metrics(alone)


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO."""
    folder = tmp_path_factory.mktemp("grpo")
    recipe = recipe_of("grpo", tiny_model, folder, steps=4, checkpoints={"every": 4})
    return run.start(recipe, folder / "run")


def test_generator_and_learner_agree(sampled: Path) -> None:
    steps = lines(sampled, "train")[1:]
    assert len(steps) == 4
    assert all(max(line["mismatch/max"], line["refit/probe_max"]) < 1e-5 for line in steps)


@pytest.mark.slow
def test_grpo_learns(tiny_model: Path, tmp_path: Path) -> None:
    recipe = recipe_of("grpo", tiny_model, tmp_path, steps=30, checkpoints={"every": 0})
    before, after = lines(run.start(recipe, tmp_path / "run"), "evaluation")
    assert after["evaluation/reward"] > before["evaluation/reward"] + 0.2


def test_an_export_has_the_values_that_were_trained_with(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_model), lora=LoraSettings(**LORA))
    trained = load_policy(CheckpointStore(sampled / "checkpoints").load("latest"), config)
    expected = dict(ModelWeights(trained).tensors())
    export(sampled, tmp_path / "merged", "latest")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(written) <= set(expected)
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    assert "quantization" not in (tmp_path / "merged" / "config.json").read_text()

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    export(sampled, tmp_path / "adapter", "latest", adapter_only=True)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert "load_in_4bit=True" in (tmp_path / "adapter" / "README.md").read_text()
    logits = torch.tensor(run_without_whet(READER, str(tmp_path / "adapter"), TOKENS, folder=tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(logits, merged(torch.tensor(TOKENS)).logits, rtol=1e-3, atol=1e-4)


def test_an_evaluation_before_training_is_of_the_quantized_model(sampled: Path, tmp_path: Path) -> None:
    before = lines(sampled, "evaluation")[0]
    done = whet("eval", str(sampled / "recipe.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward"] == before["evaluation/reward"]


def test_a_plan_states_what_4_bits_save(tiny_model: Path) -> None:
    words = ["plan", "sft", "data.path=rows.jsonl", f"model.path={tiny_model}", "learner.precision=float32"]
    plain, quantized = (whet(*words, f"model.lora={json.dumps(lora)}") for lora in ({"rank": 8}, LORA))
    assert plain.returncode == quantized.returncode == 0, plain.stderr + quantized.stderr
    assert "in 4 bits" not in plain.stdout
    assert re.search(r"the policy's linear layers are in 4 bits: [\d.]+ \w+ instead of [\d.]+ \w+", quantized.stdout)
    weights = [float(re.findall(r"always +weights +([\d.]+) KiB", done.stdout)[0]) for done in (plain, quantized)]
    assert weights[1] < 0.6 * weights[0]
