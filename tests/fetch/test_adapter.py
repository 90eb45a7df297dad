"""A model's path may be an adapter of PEFT: it is merged into its base model once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.toy import toy_settings
from whet.base.errors import WhetError
from whet.fetch.model import check_model, fetch_model
from whet.lineage.reading import inputs_of
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config, load_tokenizer

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
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    shutil.rmtree(adapter)
