"""A model's operations equal torch's count, for each kind of attention and mixture of experts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny
from whet.models.flops import ModelFlops, peak_tflops

TOKENS = 24


def counted(model, backward=False):
    """Return torch's count for one text: products with weights, and products of attention for every pair of tokens."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
        if backward:
            output.logits.sum().backward()
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    return flops["aten.mm"], flops["aten.bmm"]


def needed(flops, backward=False):
    """Return the products with weights, and of attention if every token attended to every token."""
    position = torch.arange(TOKENS)
    without = ModelFlops(flops.body, flops.body_trained, flops.head, flops.head_trained, {})
    weights = without.needed(position, TOKENS, backward)
    alone = ModelFlops(0, 0, 0, 0, dict.fromkeys([None], sum(flops.pair.values())))
    return weights, alone.needed(torch.full((TOKENS,), TOKENS - 1), 0, backward)


@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_qwen3, tiny.tiny_gemma])
@pytest.mark.parametrize("backward", [False, True])
def test_dense_models_need_what_torch_counts(build, backward):
    model = build()
    assert needed(ModelFlops.of(model), backward) == counted(model, backward)


def test_latent_attention_and_experts_need_what_torch_counts():
    """torch counts no grouped products, with which the routed experts are computed."""
    model = tiny.tiny_deepseek()
    config = model.config
    weights, attention = counted(model)
    experts = 2 * config.num_experts_per_tok * 3 * config.moe_intermediate_size * config.hidden_size * TOKENS
    assert needed(ModelFlops.of(model)) == (weights + experts, attention)


def test_a_window_bounds_the_keys_of_a_token():
    flops = ModelFlops(0, 0, 0, 0, {8: 1.0, None: 100.0})
    position = torch.arange(10)
    assert flops.needed(position, 0) == sum(range(1, 9)) + 2 * 8 + 100 * 55


def test_a_shared_prompt_counts_once():
    """A prompt of 5 tokens with two answers of 3: positions continue the prompt's."""
    flops = ModelFlops(1.0, 1.0, 0, 0, {None: 1000.0})
    position = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7])
    assert flops.needed(position, 0) == 11 + 1000 * (15 + 21 + 21)


def test_frozen_weights_need_no_gradient_of_their_own():
    model = tiny.tiny_llama().requires_grad_(False)
    frozen = ModelFlops.of(model)
    assert frozen.needed(torch.arange(4), 4, backward=True) == pytest.approx(
        2 * 4 * (frozen.body + frozen.head) + 3 * sum(frozen.pair.values()) * 10
    )


def test_a_value_head_is_one_row():
    model = tiny.tiny_llama()
    assert ModelFlops.of(model, value_head=True).head == 2 * model.config.hidden_size


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A4000", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, peak):
    assert peak_tflops(name, "bfloat16") == peak
    assert peak_tflops(name, "float32") is None
