"""Weights without a sync: all of a learner's, bucket by bucket; some that are there; and into a generator at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.weights.source import WeightRequest


@dataclass
class Listed:
    """``NamedTensors`` of existing tensors."""

    named: list[tuple[str, Tensor]]

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self.named]

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.named


async def weights_of(
    learner: Any, dtype: torch.dtype = torch.float32, bucket_bytes: int = 2**20
) -> list[tuple[str, Tensor]]:
    """Return (Hugging Face name, tensor) of each weight, as received in this process."""
    found: list[tuple[str, Tensor]] = []
    await learner.begin_weights(WeightRequest(dtype, bucket_bytes))
    while (bucket := await learner.next_weights()) is not None:
        found += bucket.tensors
    await learner.end_weights()
    return found


async def load_into(generator: Any, named: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
    """Into a generator of this process."""
    async with generator.refit(version) as models:
        for model in models:
            model.load(named)
