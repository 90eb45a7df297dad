"""Joint products give what the separate layers give, whoever calls them, and follow their weights."""

import copy

import pytest
import torch
from torch import nn

from tests.tiny import tiny_llama
from whet.models.fusion import Product, fuse


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=bias) for n in (8, 4, 4))


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def pair(request: pytest.FixtureRequest) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    plain = Attention(request.param)
    joined = copy.deepcopy(plain)
    assert len(fuse(joined)) == 1
    return plain, joined


def same(plain: Attention, joined: Attention, name: str, x: torch.Tensor) -> None:
    torch.testing.assert_close(getattr(joined, name)(x), getattr(plain, name)(x))


@torch.no_grad()
def test_siblings_give_their_own_products_in_any_order(pair: tuple[Attention, Attention]) -> None:
    x = torch.randn(3, 8)
    for name in ("v_proj", "q_proj", "k_proj", "k_proj", "q_proj"):
        same(*pair, name, x)


@torch.no_grad()
def test_a_sibling_called_with_another_input_does_not_get_the_first_ones_product(
    pair: tuple[Attention, Attention],
) -> None:
    x = torch.randn(3, 8)
    same(*pair, "q_proj", x)
    same(*pair, "k_proj", torch.randn(3, 8))
    same(*pair, "v_proj", x)
    same(*pair, "q_proj", x)
    x += 1  # the same tensor object with other values
    same(*pair, "k_proj", x)


@torch.no_grad()
def test_new_weights_are_used_at_once(pair: tuple[Attention, Attention]) -> None:
    x = torch.randn(3, 8)
    same(*pair, "q_proj", x)
    for module in pair:
        module.k_proj.weight.copy_(torch.ones(4, 8))
    same(*pair, "k_proj", x)


@torch.no_grad()
def test_weights_written_behind_autograds_back_are_used_after_a_refresh() -> None:
    linear = nn.Linear(8, 4)
    product = Product([linear])
    x = torch.randn(16, 8)
    linear(x)
    linear.weight.data.fill_(1.0)
    product.refresh()
    torch.testing.assert_close(linear(x), nn.functional.linear(x, torch.ones(4, 8), linear.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(576, 960), (64, 264), (24, 40)], ids=str)
@torch.no_grad()
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(*sizes, dtype=dtype)
    Product([linear])
    x = torch.randn(1, 96, sizes[0], dtype=dtype)
    whole = linear(x)
    for rows in (16, 32, 48, 64, 80):
        assert torch.equal(linear(x[:, :rows]), whole[:, :rows])
    shuffled = torch.randperm(96)
    assert torch.equal(linear(x[:, shuffled]), whole[:, shuffled])


@torch.no_grad()
def test_a_layer_moved_to_other_storage_is_computed_from_there(pair: tuple[Attention, Attention]) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    for module in pair:
        module.double()
        module.v_proj.weight.data = torch.full((4, 8), 2.0, dtype=torch.float64)
    for name in ("q_proj", "k_proj", "v_proj"):
        same(*pair, name, x)


def test_with_gradients_enabled_each_layer_uses_its_own_weight(pair: tuple[Attention, Attention]) -> None:
    x = torch.randn(3, 8)
    pair[1].q_proj(x).sum().backward()
    assert pair[1].q_proj.weight.grad is not None
    assert pair[1].k_proj.weight.grad is None


def test_a_transformers_model_keeps_its_weights_and_its_logits() -> None:
    plain, joined = tiny_llama(), tiny_llama()
    assert len(fuse(joined)) == 9  # q k v, gate up, o, down of two layers, and the head
    assert fuse(joined) == []
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(joined(tokens).logits, plain(tokens).logits)
    for (name, a), (_, b) in zip(plain.state_dict().items(), joined.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
