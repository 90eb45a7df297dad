"""A model's path may be an adapter of PEFT: it is merged into its base model once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.learner.parts import some_batch, whole
from tests.tiny import tiny_qwen3, tiny_tokenizer
from tests.tiny_vision import save_tiny_vision
from tests.toy import toy_settings
from whet.algorithms.distillation import Distillation
from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.fetch.model import check_model, fetch_model
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.worker import LearnerWorker
from whet.lineage.reading import inputs_of
from whet.models.config import ModelConfig
from whet.models.families import PICTURE
from whet.models.loading import load_images, load_model, load_model_config, load_tokenizer

TOKENS = torch.tensor([[5, 17, 99, 3, 250, 41, 7]])


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an adapter that changes the model."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_merged_model_computes_what_peft_computes(adapter: Path, tiny_model: Path) -> None:
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter).eval()
    config = ModelConfig(path=str(adapter))
    check_model(config.path)
    model = AutoModelForCausalLM.from_pretrained(fetch_model(config.path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert load_model_config(config).num_hidden_layers == 2
    assert load_tokenizer(config).get_vocab() == AutoTokenizer.from_pretrained(tiny_model).get_vocab()


@pytest.mark.parametrize("adapted", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=" ".join)
def test_tied_embeddings_are_merged_where_they_are_adapted(
    adapted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    base = tiny_qwen3()
    assert base.config.tie_word_embeddings
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=adapted, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(fetch_model(str(tmp_path / "adapter"))).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_a_teacher_may_be_an_adapter(adapter: Path, tiny_model: Path) -> None:
    algorithm = Distillation.model_validate({"teachers": {"tutor": {"path": str(adapter)}}})
    algorithm.check_models(ModelConfig(path=str(tiny_model)))
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter).eval()
    config = WorkerConfig(model=algorithm.teachers["tutor"], learner=LearnerConfig(precision="float32"))
    batch = some_batch()
    (scored,) = LearnerWorker(config).score(whole(batch), {"logprobs"})
    answer = [int(batch.tokens[token]) for token in path_to(batch, int(batch.trained_tokens[-1]))]
    with torch.no_grad():
        last = expected(torch.tensor([answer])).logits[0, -2].log_softmax(-1)[answer[-1]]
    torch.testing.assert_close(scored["logprobs"][batch.trained_tokens[-1]], last, rtol=1e-4, atol=1e-4)


def path_to(batch: Batch, token: int) -> list[int]:
    """Return the places of a token and of those before it in its sequence."""
    places = []
    while token >= 0:
        places.append(token)
        token = int(batch.predictor[token])
    return places[::-1]


def test_a_base_model_that_reads_images_keeps_its_vision_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    save_tiny_vision(tmp_path / "base", "qwen3_vl")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    adapted = LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=r".*language_model.*q_proj", init_lora_weights=False
    )
    get_peft_model(model, adapted).save_pretrained(tmp_path / "adapter")
    config = ModelConfig(path=str(tmp_path / "adapter"), vision="frozen")
    merged, base = (
        dict(load_model(each, dtype=torch.float32).named_parameters())
        for each in (config, config.model_copy(update={"path": str(tmp_path / "base")}))
    )
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {f"model.language_model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)}
    assert load_images(config).tokens(PICTURE)


def test_it_is_merged_once_and_again_when_the_adapter_changes(adapter: Path, tmp_path: Path) -> None:
    first = fetch_model(str(adapter))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert fetch_model(str(adapter)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert fetch_model(str(adapter)) != first


def test_the_lineage_has_the_adapter_and_its_base(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    from tests.toy import read_settings

    recipe = read_settings(toy_settings(tiny_model, model={"path": str(adapter)}))
    files = {each.setting: each.files for each in inputs_of(recipe, tmp_path / "run")}
    assert str(adapter / "adapter_model.safetensors") in files["model"]
    assert str(tiny_model / "model.safetensors") in files["model (base)"]


def test_what_does_not_fit_is_named(adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    for changes, problem in (
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"task_type": "SEQ_CLS"}, "is for the task SEQ_CLS"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, "there is no such folder"),
    ):
        file.write_text(json.dumps(config | changes))
        with pytest.raises(WhetError, match=problem):
            check_model(str(adapter))
    file.write_text("{")
    with pytest.raises(WhetError, match=r"adapter_config\.json is damaged, it is not JSON"):
        check_model(str(adapter))
    file.write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(WhetError, match="can't be merged into"):
        fetch_model(str(adapter))
    file.write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    others = {name.replace("layers", "blocks"): tensor for name, tensor in tensors.items()}
    save_file(others, adapter / "adapter_model.safetensors")
    with pytest.raises(WhetError, match=r"can't be merged into .*Found missing adapter keys"):
        fetch_model(str(adapter))
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    shutil.rmtree(adapter)
