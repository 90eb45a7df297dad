"""Mixtures of several teachers' distributions, as pure functions of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def mixture(logprobs: Tensor, weights: Sequence[float]) -> Tensor:
    """Return log(sum over teachers of w p / sum of w). [teachers, *] -> [*]"""
    shares = torch.tensor(weights, dtype=torch.float64)
    shares = (shares / shares.sum()).log().to(logprobs)
    return (logprobs + shares.reshape(-1, *[1] * (logprobs.ndim - 1))).logsumexp(0)


def top_of_mixture(ids: Tensor, logprobs: Tensor, weights: Sequence[float], k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely distinct ids of each row under the mixture, most likely first, and their log-probs under
    it. ids [N, M] with at least k distinct ones in each row, logprobs [teachers, N, M] -> [N, k] each."""
    ids, order = ids.sort(dim=1)
    mixed = mixture(logprobs, weights).gather(1, order)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = ids[:, 1:] == ids[:, :-1]
    values, places = mixed.masked_fill(again, float("-inf")).topk(k, dim=1)
    return ids.gather(1, places), values


def span_shares(ours: Tensor, our_spans: Tensor, theirs: Tensor, their_spans: Tensor, spans: int) -> Tensor:
    """Return for each of our tokens (sum of their log-probs - sum of ours) over its span / our tokens in it; 0 if they
    have no token in the span. Log-probs and numbers of spans, [T] of ours and [U] of theirs -> [T]"""
    our_counts, their_counts = (torch.bincount(numbers, minlength=spans) for numbers in (our_spans, their_spans))
    zeros = ours.new_zeros(spans)
    gap = zeros.index_add(0, their_spans, theirs) - zeros.index_add(0, our_spans, ours)
    return torch.where(their_counts > 0, gap / our_counts, 0.0)[our_spans]
