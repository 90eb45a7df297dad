"""Attention of a padded block by torch's fused kernels, or by plain batched products with a custom backward pass.

Queries are [C, L, heads, size]; keys and values are [C, K, kv heads, size]. For the short rows of reinforcement
learning plain products take a quarter of the time of ``scaled_dot_product_attention`` on a CPU with oneDNN. They also
support soft caps (Gemma 2) and sinks (gpt-oss). Scores are recomputed in the backward pass, so the saved memory is
linear in tokens. A mask says which keys each query sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SCORES = 1 << 18  # scores in memory at once, unless one row has more: they should fit into the processor's cache


@dataclass(slots=True, frozen=True)
class AttentionSettings:
    """The settings of one layer's attention."""

    scale: float
    window: int | None = None  # a query sees this many keys, including its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads]: logits in the softmax without a value

    @classmethod
    def of_layer(
        cls, query: Tensor, scaling: float | None, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> "AttentionSettings":
        """Return the settings of a layer of transformers. ``scaling`` None: 1 / sqrt(head size)."""
        return cls(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, sinks)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores for queries of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax(scores: Tensor, settings: AttentionSettings, bias: Tensor) -> Tensor:
    """Return the probabilities of scores [..., heads, queries, keys] in float32 or float64; ``heads`` is the axis of
    ``settings.sinks``."""
    if settings.softcap is not None:
        scores = torch.tanh(scores * (settings.scale / settings.softcap)) * settings.softcap + bias
    else:
        scores = torch.add(bias, scores, alpha=settings.scale)
    if settings.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = settings.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def uses_onednn(x: Tensor) -> bool:
    """Return whether oneDNN multiplies tensors like this one, as torch's fused kernel does with its many small blocks,
    although each call of oneDNN costs more than such a block."""
    if x.device.type != "cpu":
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return the attention of torch's fused kernels, causal without a mask; [C, heads, L, size], as its inputs, where
    key and value may have fewer heads."""
    repeats = query.shape[1] // key.shape[1]
    # With fewer heads of keys, GPUs have a fast kernel only for half precision without a mask. All other cases use a
    # kernel that computes and keeps all scores of all heads at once.
    slow = mask is not None or query.dtype not in (torch.bfloat16, torch.float16)
    if repeats > 1 and slow and query.device.type != "cpu":
        key, value, repeats = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=repeats > 1
    )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, settings: AttentionSettings) -> Tensor:
    """Return the attention's output, [C, L, heads, size] -> [C, L, heads, value size].

    ``mask`` [1 or C, 1, L, K], of dtype ``score_dtype``, is added to the scaled (and capped) scores. It alone
    determines which keys a query sees; ``settings.window`` is ignored.
    """
    result: Tensor = _Dense.apply(query, key, value, mask, settings.sinks, settings)
    return result


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        sinks: Tensor | None,
        settings: AttentionSettings,
    ) -> Tensor:
        ctx.settings = settings
        kv_heads = key.shape[2]
        result = query.new_empty(*query.shape[:3], value.shape[3])
        with torch.autocast(query.device.type, enabled=False):
            for part in _parts(query, key):
                q, k, v = _fold(query[part], kv_heads), _fold(key[part], kv_heads), _fold(value[part], kv_heads)
                shares, _, _ = _shares(q, k, _rows(mask, part), sinks, settings, len(query[part]))
                _unfold_into(result[part], shares.to(v.dtype) @ v)
        ctx.save_for_backward(query, key, value, mask, sinks, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, result = ctx.saved_tensors
        kv_heads, d_result = key.shape[2], grads[0].contiguous()
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        d_sinks = None if sinks is None else torch.zeros_like(sinks)
        with torch.autocast(query.device.type, enabled=False):
            for part in _parts(query, key):
                rows = len(query[part])
                q, k, v = _fold(query[part], kv_heads), _fold(key[part], kv_heads), _fold(value[part], kv_heads)
                out, d_out = _fold(result[part], kv_heads), _fold(d_result[part], kv_heads)
                shares, capped, of_sink = _shares(q, k, _rows(mask, part), sinks, ctx.settings, rows)
                _unfold_into(d_value[part], shares.to(v.dtype).transpose(1, 2) @ d_out)
                inner = (d_out.to(shares.dtype) * out).sum(-1, keepdim=True)
                d_scores = (d_out @ v.transpose(1, 2)).to(shares.dtype).sub_(inner).mul_(shares)
                if capped is not None:
                    d_scores.mul_(capped.square_().neg_().add_(1.0))
                d_scores = d_scores.mul_(ctx.settings.scale).to(q.dtype)
                _unfold_into(d_query[part], d_scores @ k)
                _unfold_into(d_key[part], d_scores.transpose(1, 2) @ q)
                if d_sinks is not None and of_sink is not None:
                    per_head = (of_sink * inner).view(rows, d_sinks.numel(), -1).sum((0, 2))
                    d_sinks -= per_head.to(d_sinks.dtype)
        return d_query, d_key, d_value, None, d_sinks, None


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Return the slices of rows that are computed together."""
    rows = max(1, _SCORES // (query.shape[2] * query.shape[1] * key.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(query), rows)]


def _rows(mask: Tensor, part: slice) -> Tensor:
    return mask if len(mask) == 1 else mask[part]


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """Fold [C, L, heads, size] into [C * kv heads, (heads / kv heads) * L, size]: heads that share keys form one
    matrix."""
    rows, length, heads, size = x.shape
    return (
        x.view(rows, length, kv_heads, heads // kv_heads, size)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows * kv_heads, -1, size)
    )


def _unfold_into(place: Tensor, x: Tensor) -> None:
    rows, length, heads, size = place.shape
    kv_heads = x.shape[0] // rows
    folded = x.view(rows, kv_heads, heads // kv_heads, length, size).permute(0, 3, 1, 2, 4)
    place.view(rows, length, kv_heads, heads // kv_heads, size).copy_(folded)


def _shares(
    q: Tensor, k: Tensor, mask: Tensor, sinks: Tensor | None, settings: AttentionSettings, rows: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return attention probabilities [C * kv heads, group * L, K], tanh of the capped scores, and the sinks'
    probabilities."""
    scores = (q @ k.transpose(1, 2)).to(mask.dtype).mul_(settings.scale)
    capped = None
    if settings.softcap is not None:
        capped = scores.div_(settings.softcap).tanh_()
        scores = capped * settings.softcap
    by_head = scores.view(rows, -1, mask.shape[2], mask.shape[3])
    by_head.add_(mask)
    if sinks is None:
        return torch.softmax(scores, -1), capped, None
    sink = sinks.to(scores.dtype).view(1, -1, 1).expand(rows, -1, mask.shape[2]).reshape(*scores.shape[:2], 1)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink)
    return scores.sub_(total).exp_(), capped, (sink - total).exp_()
