"""LoRA's products on CPUs where all tokens of a batch are under one adapter: two matrix products for each layer.
vLLM's own are made for tokens under different adapters and copy A and B once for every token, in float32."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):
    """vLLM's class, and what it does where tokens differ."""

    _only: int | None = None  # the place of the adapter that all tokens of this batch are under

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Before each batch that has other requests than the one before."""
        super().update_metadata(*args, **kwargs)
        places = self.token_lora_indices.unique().tolist()
        self._only = places[0] if len(places) == 1 and places[0] >= 0 else None

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add (x A^T) B^T to ``y`` [tokens, outputs], in place; x [tokens, inputs], of each of several fused matrices
        A [adapters, 1, rank, inputs] and B [adapters, 1, outputs, rank]. B is scaled already."""
        only = self._only
        if only is None:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        first = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, first : first + size].add_(F.linear(F.linear(x, a[only, 0]), b[only, 0]), alpha=scale)
            first += size


def use_one_adapter(manager: Any) -> None:
    """Let the layers of vLLM's LoRA manager, which has no adapter at the moment, multiply so. On devices other than
    CPUs vLLM's own products stay."""
    for key, wrapper in manager.punica_wrapper_mapping.items():
        if type(wrapper) is not PunicaWrapperCPU:
            continue
        own = OneAdapter(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
        manager.punica_wrapper_mapping[key] = own
        for layer in manager.modules.values():
            if layer.punica_wrapper is wrapper:
                layer.set_mapping(own)
