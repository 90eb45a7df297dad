"""A decoder that saves fewer activations says the same to the bit, and learns the same."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.groups import group
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe
from whet.core.batch import Batch
from whet.models.attention.forest import forest_hidden, use_forest_attention
from whet.models.saved_activations import save_fewer_activations

MODELS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "qwen3_moe": tiny_qwen3_moe}


def batch() -> Batch:
    return Batch.from_groups([group(f"g{i}", [3, 4, 5 + i], [[7] * (3 + i), [8, 9]]) for i in range(4)])


def learned(model: Any, half: bool = False) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return the hidden states, gradients, and the bytes that were saved for them."""
    model.zero_grad()
    saved: dict[int, Any] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), torch.autocast("cpu", enabled=half):
        hidden = forest_hidden(model, batch())
    kept = sum(storage.nbytes() for storage in saved.values())
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    (hidden * pull).mean().backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients, kept


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    squares = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (squares / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


@pytest.mark.parametrize("family", MODELS)
def test_outputs_are_the_same_to_the_bit_and_gradients_as_precise_with_fewer_activations(family: str) -> None:
    plain: Any = MODELS[family]().train()
    use_forest_attention(plain)
    if family == "qwen3_moe":
        plain.set_experts_implementation("eager")  # the grouped product has no float64
    fewer = copy.deepcopy(plain)
    assert save_fewer_activations(fewer) >= 3 * len(fewer.model.layers)
    assert list(fewer.state_dict()) == list(plain.state_dict())
    fewer = copy.deepcopy(fewer)  # a copy computes with its own weights
    exact = learned(copy.deepcopy(plain).double())[1]
    for half in (False, True):
        states, gradients, saved = learned(plain, half)
        found, others, kept = learned(fewer, half)
        assert torch.equal(found, states)
        assert error(others, exact) < 1.3 * error(gradients, exact) + 1e-7
        assert kept < 0.8 * saved
    with torch.no_grad():
        assert torch.equal(forest_hidden(fewer, batch()), forest_hidden(plain, batch()))


def test_an_adapter_gets_the_same_gradients() -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    plain = get_peft_model(tiny_llama(), lora).train()
    use_forest_attention(plain.get_base_model())
    fewer = copy.deepcopy(plain)
    save_fewer_activations(fewer)
    states, gradients, _ = learned(plain)
    found, others, _ = learned(fewer)
    assert torch.equal(found, states)
    assert error(others, gradients) < 1e-6


def test_a_forward_pass_may_have_no_backward_pass_or_two() -> None:
    model = tiny_llama().train()
    use_forest_attention(model)
    save_fewer_activations(model)
    forest_hidden(model, batch())
    expected = learned(model)[1]
    model.zero_grad()
    hidden = forest_hidden(model, batch())
    loss = (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {name: p.grad.double() / 2 for name, p in model.named_parameters() if p.grad is not None}
    assert error(twice, expected) < 1e-6
