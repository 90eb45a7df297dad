"""LoRA's products on CPUs beside vLLM's own. No engine runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from whet.generators.vllm_one_adapter import OneAdapter, use_one_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TOKENS, INPUTS, RANK, SIZES = 5, 12, 4, (6, 3)


class Layer:
    """As a fused layer, with room for two adapters."""

    def __init__(self, wrapper: Any) -> None:
        random = torch.Generator().manual_seed(0)
        self.a = tuple(torch.randn(2, 1, RANK, INPUTS, generator=random) for _ in SIZES)
        self.b = tuple(torch.randn(2, 1, size, RANK, generator=random) for size in SIZES)
        self.set_mapping(wrapper)

    def set_mapping(self, wrapper: Any) -> None:
        self.punica_wrapper = wrapper

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(len(x), sum(SIZES))
        self.punica_wrapper.add_lora_linear(y, x, self.a, self.b, 1.0, SIZES)
        return y


@pytest.mark.parametrize("under", [[7] * 5, [9] * 5, [0] * 5, [7, 7, 9, 9, 9], [7, 7, 7, 0, 0]])
def test_what_is_added_is_what_vllm_adds(under: list[int]) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    theirs = PunicaWrapperCPU(16, 16, "cpu")
    ours, layer = Layer(theirs), Layer(theirs)
    manager = SimpleNamespace(
        max_num_batched_tokens=16,
        max_num_seqs=16,
        device="cpu",
        modules={"layer": ours},
        punica_wrapper_mapping={"model": theirs},
    )
    use_one_adapter(manager)
    wrapper = manager.punica_wrapper_mapping["model"]
    assert ours.punica_wrapper is wrapper
    for one in (theirs, wrapper):
        one.update_metadata(LoRAMapping(tuple(under), tuple(under), is_prefill=True), [7, 9], 3, 100)
    assert (wrapper._only is None) == (len(set(under)) > 1 or not under[0])
    x = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), layer(x))
    use_one_adapter(manager)
    assert manager.punica_wrapper_mapping["model"] is wrapper is ours.punica_wrapper
    assert type(wrapper) is OneAdapter
