"""Routers differ between families: some have a matrix, some a linear layer, some take a bias of the experts, too."""

import pytest
import torch

from tests.models.tiny_families import tiny_model
from whet.models.moe.fixed_experts import NAME, use_fixed_experts


@pytest.mark.parametrize("family", ["afmoe", "gpt_oss", "hy_v3", "minimax_m2", "qwen3_moe"])
def test_with_fixed_numbers_of_rows_a_model_computes_the_same(family: str) -> None:
    model = tiny_model(family, torch.float32)
    tokens = torch.arange(10, 31)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        use_fixed_experts(model)
        assert model.config._experts_implementation == NAME
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
