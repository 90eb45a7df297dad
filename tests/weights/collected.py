"""All of a learner's weights, bucket by bucket."""

from typing import Any

import torch
from torch import Tensor

from whet.weights.parcel import Sending


async def weights_of(
    learner: Any, dtype: torch.dtype = torch.float32, bucket_bytes: int = 2**20
) -> list[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), as somebody in this process gets them."""
    found: list[tuple[str, Tensor]] = []
    await learner.begin_weights(Sending(dtype, bucket_bytes))
    while (parcel := await learner.next_weights()) is not None:
        found += parcel.tensors
    await learner.end_weights()
    return found
