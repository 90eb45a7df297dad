"""Packed layers give what the layers themselves give, and follow their weights."""

import pytest
import torch
from torch import nn

from tests.tiny import tiny_llama
from whet.models.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="oneDNN is not here")


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def packed(request: pytest.FixtureRequest) -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4, bias=request.param)
    return linear, PackedLinear(linear)


def assert_it_is_its_product(linear: nn.Linear, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(16, 8, dtype=dtype)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


@torch.no_grad()
def test_new_weights_are_used_at_once(packed: tuple[nn.Linear, PackedLinear]) -> None:
    linear, _ = packed
    assert_it_is_its_product(linear)
    linear.weight.copy_(torch.ones(4, 8))
    assert_it_is_its_product(linear)


@torch.no_grad()
def test_weights_written_behind_autograds_back_are_used_after_a_refresh(packed: tuple[nn.Linear, PackedLinear]) -> None:
    linear, product = packed
    assert_it_is_its_product(linear)
    linear.weight.data.fill_(1.0)
    product.refresh()
    assert_it_is_its_product(linear)


@torch.no_grad()
def test_a_layer_moved_to_other_storage_is_computed_from_there(packed: tuple[nn.Linear, PackedLinear]) -> None:
    linear, _ = packed
    assert_it_is_its_product(linear)
    linear.weight.data = torch.full((4, 8), 2.0)
    assert_it_is_its_product(linear)
    linear.double()
    assert_it_is_its_product(linear, torch.float64)


def test_with_gradients_enabled_a_layer_uses_its_own_weight(packed: tuple[nn.Linear, PackedLinear]) -> None:
    linear, _ = packed
    linear(torch.randn(3, 8)).sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_transformers_model_keeps_its_weights_and_its_logits(dtype: torch.dtype) -> None:
    plain, model = tiny_llama().to(dtype), tiny_llama().to(dtype)
    if not can_pack(model.lm_head.weight):
        pytest.skip("oneDNN has no products of bfloat16 here")
    assert len(pack_linears(model)) == 15  # q, k, v, o, gate, up and down of two layers, and the head
    assert pack_linears(model) == []
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    for (name, a), (_, b) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
