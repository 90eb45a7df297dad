"""Weights in the layout of published files."""

import pytest
import torch

from whet.base.errors import WhetError
from whet.models.published import as_published

EXPERTS = torch.arange(24.0).view(2, 3, 4)


def test_only_experts_of_models_that_publish_them_so_are_transposed() -> None:
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        assert torch.equal(as_published("qwen3_vl_moe", name, EXPERTS), EXPERTS.mT)
        assert as_published("qwen3_moe", name, EXPERTS) is EXPERTS
    assert as_published("qwen3_vl_moe", "mlp.gate.weight", EXPERTS) is EXPERTS


def test_square_matrices_whose_layout_nothing_tells_are_refused() -> None:
    with pytest.raises(WhetError, match=r"^mlp\.experts\.down_proj has square matrices, \[2, 3, 3\]: transformers"):
        as_published("qwen3_vl_moe", "mlp.experts.down_proj", torch.zeros(2, 3, 3))
