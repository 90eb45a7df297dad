"""From logits to the distribution that is sampled from: temperature, then min-p, top-k and top-p, as vLLM orders them.

Tokens stay by comparison with a threshold, so what is kept depends on the logits alone and not on a sort's order.
"""

import math

import torch
from torch import Tensor

from whet.core.types import Distribution


def truncates(distribution: Distribution) -> bool:
    """Return whether some tokens may fall outside the support."""
    return distribution.top_k > 0 or distribution.top_p < 1.0 or distribution.min_p > 0.0


def least_logit(logits: Tensor, distribution: Distribution) -> Tensor:
    """The least logit that may still be sampled, given logits already divided by the temperature. [T, V] -> [T, 1]

    min-p keeps p >= min_p * max p; top-k keeps the k largest; top-p keeps the smallest set of the largest whose mass,
    among what the others left, reaches p. Ties with the last one kept are kept; the most likely token always is.
    """
    floor = torch.full_like(logits[:, :1], float("-inf"))
    if distribution.min_p > 0.0:
        floor = logits.amax(-1, keepdim=True) + math.log(distribution.min_p)
    if 0 < distribution.top_k < logits.shape[-1]:
        floor = torch.maximum(floor, torch.topk(logits, distribution.top_k, dim=-1).values[:, -1:])
    if distribution.top_p < 1.0:
        descending = logits.masked_fill(logits < floor, float("-inf")).sort(dim=-1, descending=True).values
        mass = descending.double().softmax(-1).cumsum(-1)
        kept = (mass < distribution.top_p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        floor = torch.maximum(floor, descending.gather(-1, kept))
    return floor
