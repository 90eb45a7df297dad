"""Counted sizes equal the real model's; planned activations equal the tensors that autograd saves."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny import tiny_granite, tiny_llama, tiny_mixtral, tiny_qwen3
from whet.diagnose.activations import activation_bytes, model_size
from whet.models.attention.forest import use_forest_attention
from whet.models.attention.layout import ForestLayout
from whet.models.config import LoraSettings, ModelConfig
from whet.models.loading import load_model
from whet.models.saved_activations import save_fewer_activations

MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_model_has_them(name):
    model = MODELS[name]()
    size = model_size(model.config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.tensors == len(model.state_dict())
    assert size.sent == sum(tensor.numel() for tensor in model.state_dict().values())
    assert size.experts == 0
    assert size.largest_layer == sum(p.numel() for p in model.model.layers[0].parameters())


def test_experts_are_counted_apart():
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=48,
    )  # fmt: skip
    size = model_size(config)
    assert size.experts == 2 * 4 * 3 * 32 * 24
    assert size.parameters == sum(p.numel() for p in Qwen3MoeForCausalLM(config).parameters())


def test_adapters_are_counted_as_peft_adds_them():
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    size = model_size(model.config, LoraSettings(rank=4))
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    assert size.adapters == sum(p.numel() for name, p in wrapped.named_parameters() if "lora_" in name)


def test_adapters_of_experts_are_counted(tmp_path):
    model, lora = tiny_mixtral(), LoraSettings(rank=4, experts=True)
    model.save_pretrained(tmp_path)
    adapted = load_model(ModelConfig(path=str(tmp_path), lora=lora), dtype=torch.float32)
    expected = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert model_size(model.config, lora).adapters == expected


def test_keys_and_values_of_a_token_are_those_of_its_heads():
    assert model_size(tiny_llama().config).kv_per_token == 2 * 2 * 2 * 32  # layers, keys and values, heads, size


def test_a_recurrent_layer_keeps_a_state_of_constant_size():
    size = model_size(tiny_granite().config)
    assert size.kv_per_token == 2 * 2 * 32  # of the one layer of attention
    assert size.state == 4 * (4 * 32 + 2 * 8) + 4 * 32 * 8  # the window of the convolution; heads, size, state


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_give_the_same_activations_as_real_ones(name, precision):
    lengths = [40, 40, 24]
    model = MODELS[name]().train()
    use_forest_attention(model)
    save_fewer_activations(model)  # as learners do
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage._cdata] = storage
        return tensor

    layout = ForestLayout.of_lengths(lengths, "cpu")
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        tokens = torch.zeros(1, 104, dtype=torch.long)
        model.model(input_ids=tokens, position_ids=position, use_cache=False, whet_forest=layout)
    real = sum(storage.nbytes() for storage in kept.values())
    assert activation_bytes(model.config, lengths, precision=precision) == pytest.approx(real, rel=0.02)


def test_recomputing_keeps_less():
    config = tiny_llama(num_hidden_layers=6).config
    kept = activation_bytes(config, [64] * 8, precision="float32")
    recomputed = activation_bytes(config, [64] * 8, precision="float32", checkpointing=True)
    assert recomputed < kept / 3
