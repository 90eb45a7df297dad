"""The sampling distribution of logits: temperature, then min-p, top-k and top-p, in vLLM's order.

Tokens are kept by comparison with a threshold, so the result depends on the logits alone and not on the order of a
sort.
"""

import math

import torch
from torch import Tensor

from whet.core.types import Distribution


def truncates(distribution: Distribution) -> bool:
    """Return whether some tokens may be outside the support."""
    return distribution.top_k > 0 or distribution.top_p < 1.0 or distribution.min_p > 0.0


def least_logit(logits: Tensor, distribution: Distribution) -> Tensor:
    """Return the smallest logit that may be sampled, given logits already divided by the temperature. [T, V] -> [T, 1]

    min-p keeps p >= min_p * max p; top-k keeps the k largest; top-p keeps the smallest set of the largest whose mass,
    among the tokens that the other two keep, reaches p. Ties with the last kept token are kept; the most likely token
    always is.
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
