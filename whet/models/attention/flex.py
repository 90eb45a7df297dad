"""Forest attention with torch's FlexAttention (arXiv 2412.05496), for GPUs: one kernel over a batch's packed tokens,
without padding and without copies of a prompt's keys for each answer.

A batch is laid out in preorder: each segment is followed by its descendants. So the mask is given by one number per
token: query q sees key k if ``k <= q < end[k]``, where ``end[k]`` is the first token after k's segment and all its
descendants. The tiles of the mask follow from the smallest and largest ``end`` of each, without N x N pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from whet.models.attention.dense import AttentionSettings
from whet.models.device import placed

TILE = 128  # tokens of a kernel tile; a batch is padded to a multiple


@dataclass(slots=True)
class FlexLayout:
    """The mask of a batch of ``size`` tokens, padded to P. Built once per batch."""

    size: int
    end: Tensor  # [P] int32
    depth: Tensor  # [P] int32: tokens before it on its path
    masks: dict[int | None, BlockMask] = field(default_factory=dict)  # by window

    @classmethod
    def of(cls, starts: Sequence[int], parents: Sequence[int], size: int, device: torch.device) -> "FlexLayout | None":
        """Return the layout of segments; None if they are not in preorder."""
        ends = [*starts[1:], size]
        before = [0] * len(starts)
        last = list(ends)
        for i in reversed(range(len(starts))):
            if parents[i] >= 0:
                last[parents[i]] = max(last[parents[i]], last[i])
        open_: list[int] = []  # segments that may have further descendants
        for i, parent in enumerate(parents):
            while open_ and open_[-1] != parent:
                open_.pop()
            if parent >= 0:
                if not open_:
                    return None
                before[i] = before[parent] + ends[parent] - starts[parent]
            open_.append(i)
        padded = -(-size // TILE) * TILE
        lengths = torch.tensor([*(end - start for start, end in zip(starts, ends, strict=True)), padded - size])
        end = torch.tensor([*last, padded]).repeat_interleave(lengths)
        offset = torch.tensor([*starts, size]) - torch.tensor([*before, 0])
        depth = torch.arange(padded) - offset.repeat_interleave(lengths)
        return cls(size, placed(end.int(), device), placed(depth.int(), device))

    def mask(self, window: int | None) -> BlockMask:
        """Return the block mask; with a ``window``, a query sees that many of the last tokens of its path."""
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        end, depth, tiles = self.end, self.depth, self.end.numel() // TILE
        first, last = end.view(tiles, TILE).aminmax(dim=1)
        key = torch.arange(tiles, device=end.device) * TILE  # the first of each tile
        query = key[:, None]
        some = (key <= query + TILE - 1) & (query < last)
        full = (key + TILE - 1 <= query) & (query + TILE - 1 < first)
        if window is not None:
            least, most = depth.view(tiles, TILE).aminmax(dim=1)
            some &= least[:, None] - most < window
            full &= most[:, None] - least < window
        return BlockMask.from_kv_blocks(
            *_listed(some & ~full),
            *_listed(full),
            BLOCK_SIZE=TILE,
            mask_mod=_sees(end) if window is None else _sees_within(end, depth, window),
            seq_lengths=(end.numel(), end.numel()),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Compute one layer, [1, heads, N, size] -> [1, N, heads, size]; key and value may have fewer heads."""
        more = (0, 0, 0, self.end.numel() - self.size)
        query, key, value = (nn.functional.pad(x, more) for x in (query, key, value))
        score = None if settings.softcap is None else _capped(settings.softcap)
        out: Tensor = _kernel(query.device.type)(
            query,
            key,
            value,
            score_mod=score,
            block_mask=self.mask(settings.window),
            scale=settings.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[:, :, : self.size].transpose(1, 2)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key tiles of each tile of queries, and a permutation that lists them first."""
    numbers = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], numbers.int()[None, None]


def _sees(end: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (k <= q) & (q < end[k])


def _sees_within(end: Tensor, depth: Tensor, window: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (k <= q) & (q < end[k]) & (depth[q] - depth[k] < window)


def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)


@cache
def _kernel(kind: str) -> Callable[..., Any]:
    """Return the kernel, compiled once per process for batches of any size, which takes up to a minute. On a CPU it
    consists of plain operations on all pairs, without a backward pass, for tests."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=True) if kind == "cuda" else kernel
