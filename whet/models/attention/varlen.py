"""Forest attention with FlashAttention over rows of different lengths, for GPUs: no padding, no compilation, and no
cost for new shapes. On a CPU the same calls are plain products: slow, and for tests.

A layer with full attention works in a cascade: one call over each segment's tokens, and one for each level of shared
prompts, whose rows have a prompt's tokens as keys and all its descendants' tokens as queries. So a prompt's keys are
not copied for each answer. The calls' results are combined by their log-sum-exp. A sliding window ends at a different
token of the prompt for each query; so with a window, and if a batch is distributed over ranks, each segment is one row
with its ancestors' keys gathered in front of its keys: at most a window's length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from whet.models.attention.dense import AttentionSettings
from whet.models.attention.row import Rows, attend, attend_backward
from whet.models.device import placed
from whet.models.shards import Tokens


@dataclass(slots=True, frozen=True)
class Call:
    """One call of the kernel, over some of the tokens."""

    rows: Rows
    query: Tensor | None = None  # [Q] distinct tokens; None: all, in order
    key: Tensor | None = None  # [K] tokens; None: all, in order


@dataclass(slots=True)
class VarlenLayout:
    """The calls for a batch of segments. Built once per batch."""

    segments: list[range]  # tokens of each segment
    ancestors: list[list[int]]  # of each segment, from the root
    longest: int  # tokens on a path
    device: torch.device
    tokens: Tokens
    calls: dict[int | None, list[Call]] = field(default_factory=dict)  # by window

    @classmethod
    def of(
        cls, starts: Sequence[int], parents: Sequence[int], size: int, device: torch.device, tokens: Tokens
    ) -> "VarlenLayout":
        """Return the layout of segments, in any order with parents before children."""
        segments = [range(start, end) for start, end in zip(starts, [*starts[1:], size], strict=True)]
        ancestors: list[list[int]] = []
        paths: list[int] = []  # tokens up to a segment's end
        for segment, parent in zip(segments, parents, strict=True):
            ancestors.append([*ancestors[parent], parent] if parent >= 0 else [])
            paths.append(len(segment) + (paths[parent] if parent >= 0 else 0))
        return cls(segments, ancestors, max(paths), device, tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Compute one layer, [1, heads, N, size] -> [1, N, heads, size]; key and value may have fewer heads."""
        window = None if settings.window is None or settings.window >= self.longest else settings.window
        if window not in self.calls:
            gathers = window is not None or self.tokens.spread
            self.calls[window] = [self._gathering(window)] if gathers else self._cascade()
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.tokens.spread:  # in one call
            key, value = self.tokens.gather(torch.cat([key, value], 1)).chunk(2, 1)
        out: Tensor = _Attention.apply(query, key, value, self.calls[window], settings.scale)
        return out[None]

    def _cascade(self) -> list[Call]:
        """Return the call over segments' tokens, and one for each level of segments with descendants."""
        levels: list[dict[int, list[range]]] = []  # for each level: descendants, by segment
        for segment, path in zip(self.segments, self.ancestors, strict=True):
            for depth, ancestor in enumerate(path):
                if depth == len(levels):
                    levels.append({})
                levels[depth].setdefault(ancestor, []).append(segment)
        lengths = [len(segment) for segment in self.segments]
        calls = [Call(self._rows(lengths, lengths, causal=True))]
        for level in levels:
            keys = [self.segments[ancestor] for ancestor in level]
            rows = self._rows(
                [_total(below) for below in level.values()], [len(prompt) for prompt in keys], causal=False
            )
            calls.append(Call(rows, self._places(chain.from_iterable(level.values())), self._places(keys)))
        return calls

    def _gathering(self, window: int | None) -> Call:
        """Return the single call whose rows are segments with their ancestors' keys, or this rank's part of each."""
        queries, keys, places = list[int](), list[int](), list[range]()
        for run in self.tokens.runs(self.segments[-1].stop):
            for segment, path in zip(self.segments, self.ancestors, strict=True):
                here = range(max(segment.start, run.start), min(segment.stop, run.stop))
                if not here:
                    continue
                before = [*(self.segments[ancestor] for ancestor in path), range(segment.start, here.start)]
                # not visible even to the first query
                unseen = 0 if window is None else max(0, _total(before) - window + 1)
                seen = []
                for part in before:
                    seen.append(part[unseen:])
                    unseen = max(0, unseen - len(part))
                queries.append(len(here))
                keys.append(_total(seen) + len(here))
                places += [*seen, here]
        return Call(self._rows(queries, keys, causal=True, window=window), key=self._places(places))

    def _rows(self, queries: list[int], keys: list[int], *, causal: bool, window: int | None = None) -> Rows:
        ends = placed(torch.tensor([[0, *queries], [0, *keys]]).cumsum(1).int(), self.device)
        return Rows(ends[0], ends[1], max(queries), max(keys), causal, window)

    def _places(self, runs: Iterable[range]) -> Tensor:
        return placed(torch.cat([torch.arange(run.start, run.stop) for run in runs]), self.device)


def _total(runs: Iterable[range]) -> int:
    return sum(len(run) for run in runs)


class _Attention(torch.autograd.Function):
    """The first call has all queries; the other calls add keys for some of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: list[Call], scale: float) -> Tensor:
        first, *others = calls
        k, v = _chosen(first.key, key, value)
        out, logsum = attend(query, k, v, first.rows, scale)
        out = out.to(logsum.dtype) if others else out
        for call in others:
            assert call.query is not None
            k, v = _chosen(call.key, key, value)
            more, more_logsum = attend(query.index_select(0, call.query), k, v, call.rows, scale)
            before = logsum.index_select(1, call.query)
            total = torch.logaddexp(before, more_logsum)
            share, more_share = ((part - total).exp().T[..., None] for part in (before, more_logsum))
            out.index_copy_(0, call.query, share * out.index_select(0, call.query) + more_share * more)
            logsum.index_copy_(1, call.query, total)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsum)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsum = ctx.saved_tensors
        d_out = grads[0].contiguous()
        totals = [torch.zeros_like(x, dtype=logsum.dtype) for x in (query, key, value)]
        for call in ctx.calls:
            q, q_out, q_d_out = _chosen(call.query, query, out, d_out)
            (q_logsum,) = _chosen(call.query, logsum, axis=1)
            k, v = _chosen(call.key, key, value)
            gradients = attend_backward(q_d_out, q, k, v, q_out, q_logsum, call.rows, ctx.scale)
            for total, index, gradient in zip(totals, (call.query, call.key, call.key), gradients, strict=True):
                if index is None:
                    total.add_(gradient)
                else:
                    total.index_add_(0, index, gradient.to(total.dtype))
        return *(total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True)), None, None


def _chosen(index: Tensor | None, *tensors: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    return tensors if index is None else tuple(x.index_select(axis, index) for x in tensors)
