"""Attention of packed rows of different lengths: FlashAttention's kernels (arXiv 2307.08691), which torch has for GPUs,
and the same operation in plain products for a CPU.

The backward pass takes the output and the log-sum-exp over *all* keys of a query. So if a query's keys are split over
several calls, each call's gradients are exact (Ring Attention, arXiv 2310.01889).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.attention.dense import score_dtype


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows of queries, each with its keys. The last query of a row is at the position of its last key."""

    query_ends: Tensor  # [rows + 1] int32: 0, then the end of each row's queries
    key_ends: Tensor  # [rows + 1] int32
    queries: int  # of the longest row
    keys: int  # of the longest row
    causal: bool  # if false, each query sees all keys of its row
    window: int | None = None  # of causal rows: a query sees this many keys, including its own


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [Q, heads, size] and the log-sum-exp of its scores [heads, Q], from queries [Q, heads, size]
    and keys and values [K, kv heads, size]."""
    if query.device.type == "cuda":
        out, logsum, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_lengths(rows), 0.0, rows.causal, False, scale=scale, **_window(rows)
        )
        return out, logsum
    outs, logsums = [torch.empty_like(query[:0])], [query.new_empty(query.shape[1], 0, dtype=score_dtype(query.dtype))]
    for q, k in _spans(rows):
        scores = _scores(query[q], key[k], rows, scale)
        logsums.append(scores.logsumexp(-1))
        shares = torch.exp(scores - logsums[-1][..., None])
        outs.append(torch.einsum("hqk,khd->qhd", shares, _wide(value[k], query)).to(query.dtype))
    return torch.cat(outs), torch.cat(logsums, 1)


def attend_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsum: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contribution of these keys to the gradients of queries, keys and values."""
    if query.device.type == "cuda":
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            d_out, query, key, value, out, logsum, *_lengths(rows), 0.0, rows.causal, *no_dropout,
            scale=scale, **_window(rows),
        )  # fmt: skip
        return grads
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k in _spans(rows):
        wide = logsum.dtype
        pull, k_all, v_all = d_out[q].to(wide), _wide(key[k], query), _wide(value[k], query)
        shares = torch.exp(_scores(query[q], key[k], rows, scale) - logsum[:, q, None])
        inner = (pull * out[q]).sum(-1).T[..., None]
        d_scores = shares * (torch.einsum("qhd,khd->hqk", pull, v_all) - inner) * scale
        d_query[q] = torch.einsum("hqk,khd->qhd", d_scores, k_all)
        shared = (key.shape[1], -1)
        d_key[k] = torch.einsum("hqk,qhd->khd", d_scores, query[q].to(wide)).unflatten(1, shared).sum(2)
        d_value[k] = torch.einsum("hqk,qhd->khd", shares, pull).unflatten(1, shared).sum(2)
    return d_query, d_key, d_value


def _lengths(rows: Rows) -> tuple[Tensor, Tensor, int, int]:
    return rows.query_ends, rows.key_ends, rows.queries, rows.keys


def _window(rows: Rows) -> dict[str, int]:
    """Return the bounds on the keys that a query sees before and after itself, if there is a window."""
    return {} if rows.window is None else {"window_size_left": rows.window - 1, "window_size_right": 0}


def _spans(rows: Rows) -> list[tuple[slice, slice]]:
    """Return each row's queries and keys."""
    q, k = rows.query_ends.tolist(), rows.key_ends.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _wide(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values [K, kv heads, size] to all heads, in the dtype of scores."""
    return x.to(score_dtype(x.dtype)).repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(query: Tensor, key: Tensor, rows: Rows, scale: float) -> Tensor:
    """Return the scores of one row, [heads, Q, K]."""
    scores = torch.einsum("qhd,khd->hqk", query.to(score_dtype(query.dtype)), _wide(key, query)) * scale
    if rows.causal:
        here = torch.arange(len(query))[:, None] + len(key) - len(query)
        there = torch.arange(len(key))
        unseen = there > here
        if rows.window is not None:
            unseen |= there <= here - rows.window
        scores.masked_fill_(unseen, float("-inf"))
    return scores
