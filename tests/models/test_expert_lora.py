"""LoRA on routed experts: the same as PEFT's own, which swaps parameters in each forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from tests.tiny import tiny_deepseek, tiny_llama, tiny_mixtral, tiny_qwen3_moe
from whet.base.errors import WhetError
from whet.config import SettingsError
from whet.models.config import LoraSettings, ModelConfig
from whet.models.loading import adapted_modules, load_model
from whet.models.moe.expert_lora import ExpertAdapter, expert_parameters
from whet.models.moe.experts import experts_of
from whet.weights.named_weights import ModelWeights

FAMILIES = {"qwen3_moe": tiny_qwen3_moe, "mixtral": tiny_mixtral, "deepseek": tiny_deepseek}
LORA = LoraSettings(rank=3, alpha=6.0, experts=True, target_modules=["o_proj"])
TOKENS = torch.tensor([[5, 9, 2, 7, 7, 1, 30, 12]])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](initializer_range=0.1).save_pretrained(path)
    return path


def fill(model: Any) -> Any:
    """With numbers in every A and B; fresh ones have a B of zeros."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype) * 0.1)
    return model


def ours(folder: Path) -> Any:
    return fill(load_model(ModelConfig(path=str(folder), lora=LORA), dtype=torch.float64))


def pefts(folder: Path) -> Any:
    """PEFT's, with transformers' experts."""
    plain: Any = load_model(ModelConfig(path=str(folder)), dtype=torch.float64)
    plain.set_experts_implementation("eager")
    names = expert_parameters(plain)
    config = LoraConfig(r=3, lora_alpha=6.0, target_modules=["o_proj"], target_parameters=names)
    return fill(get_peft_model(plain, config))


def run(model: Any) -> torch.Tensor:
    (model.get_base_model() if hasattr(model, "peft_config") else model).set_attn_implementation("sdpa")
    logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return logits


def test_log_probs_and_gradients_are_those_of_peft(folder: Path) -> None:
    own, other = ours(folder), pefts(folder)
    assert {type(m) for m in own.modules() if isinstance(m, ParamWrapper)} == {ExpertAdapter}
    for model in (own, other):
        run(model).log_softmax(-1)[..., 3].sum().backward()
    torch.testing.assert_close(run(own), run(other), atol=1e-10, rtol=0)
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (own, other)]
    assert gradients[0].keys() == gradients[1].keys()
    assert sum("experts" in name for name in gradients[0]) >= 4
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-10, rtol=0)


def test_what_is_published_is_the_base_and_what_peft_merges(folder: Path) -> None:
    own, merged = ours(folder), pefts(folder).merge_and_unload()
    sent, expected = dict(ModelWeights(own).tensors()), merged.state_dict()
    assert sent.keys() == expected.keys()
    described = {name: (dtype, shape) for name, dtype, shape in ModelWeights(own).described()}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-12, rtol=0)
        assert described[name] == (tensor.dtype, tensor.shape)
    base = load_model(ModelConfig(path=str(folder)), dtype=torch.float64).state_dict()
    for name, tensor in ModelWeights(own, content="base").tensors():
        assert torch.equal(tensor, base[name])


def test_without_the_adapter_it_is_the_base_and_saved_it_is_pefts(folder: Path, tmp_path: Path) -> None:
    own, plain = ours(folder), load_model(ModelConfig(path=str(folder)), dtype=torch.float64)
    with own.disable_adapter():
        torch.testing.assert_close(run(own), run(plain))
    assert (run(own) - run(plain)).abs().max() > 1e-3
    own.save_pretrained(tmp_path)
    plain.set_experts_implementation("eager")
    read = PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(run(read), run(own), atol=1e-6, rtol=0)


def test_what_can_not_be_adapted_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"weights\.lora=merged"):
        adapted_modules(ModelConfig(path=str(folder), lora=LORA))
    with pytest.raises(SettingsError, match="takes no dropout"):
        LoraSettings(experts=True, dropout=0.1)
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(WhetError, match="has no experts"):
        load_model(ModelConfig(path=str(tmp_path), lora=LORA), dtype=torch.float32)
    assert dict(experts_of(load_model(ModelConfig(path=str(folder)), dtype=torch.float32)))
