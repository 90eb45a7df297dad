"""Attention with a KV cache, for sampling.

transformers calls :func:`attention` in every layer (registered under ``NAME``); the model's keyword ``whet_cache``
determines the kind of forward pass: :class:`Prefill` for packed prompts, or the uncached parts of prompts;
:class:`DecodeCache` for the new token of each row, or several if the next tokens are guessed. A row is one completion
in flight. Its keys are in two places: the prompt's in pages, which other rows may share, the completion's in the row's
part of the cache. The softmax runs over both.

A row's result must not depend on other rows, to the bit. So every product has as many keys as all others of its kind,
and a number of rows that treats each row alike (see ``row_counts``), and padding is multiplied by an exact zero. A
prompt's KV cache must not depend on how much of it was cached before either: it is computed in tiles at fixed
positions.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import add
from typing import Protocol

import torch
from torch import Tensor, nn

from whet.engines.torch.pages import PAGE, Pages
from whet.engines.torch.prefix import Prefix
from whet.engines.torch.products import Products
from whet.engines.torch.row_counts import split_of
from whet.engines.torch.tiles import BLOCK, Lanes, padded, resized
from whet.models.attention.dense import AttentionSettings, score_dtype, softmax

NAME = "whet_decode"


class Cache(Protocol):
    """The protocol of ``whet_cache``."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Return the attention of one layer. query [1, heads, N, D], key and value [1, kv_heads, N, D or Dv] -> [1, N,
        heads, Dv]."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    whet_cache: Cache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute one attention layer of an engine model; called by transformers."""
    if whet_cache is None:
        raise RuntimeError(f"a model with attention {NAME!r} was called without whet_cache")
    settings = AttentionSettings.of_layer(query, scaling, sliding_window, softcap, s_aux)
    return whet_cache.attend(module.layer_idx, query, key, value, settings), None  # type: ignore[arg-type]


def register() -> None:
    """Register the attention with transformers. There is no mask function, so that transformers builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


class DecodeCache:
    """The KV cache of rows ``0 .. active - 1``, each with a (shared) prompt and the tokens of its completion.

    A completion's keys per layer: [capacity, blocks, kv_heads, BLOCK, D], where ``span``, the tokens of all blocks,
    grows with the longest completion: batched products are fast only on tensors without gaps. Use: ``join`` and
    ``leave`` change the rows, ``begin`` starts a forward pass over new tokens of each row, and ``commit`` says how many
    of them stay.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = padded(capacity)
        self.device = device
        self.prefixes: list[Prefix] = []  # [active]
        self.lengths: list[int] = []  # [active] completion tokens in the cache
        self.span = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.pages = Pages()
        self._biases: dict[int | None, Tensor] = {}
        self._indexed_span = 0
        self._products: dict[tuple[int, ...], Products] = {}  # by kv heads, query heads of each, and their widths

    @property
    def active(self) -> int:
        return len(self.prefixes)

    def join(self, prefixes: Iterable[Prefix]) -> None:
        """Add rows at the end, in this order, without completion tokens."""
        self.pages.join(new := list(prefixes))
        self.prefixes += new
        self.lengths += [0] * len(new)

    def leave(self, row: int) -> None:
        """Drop a finished row. The last row takes its number, so that rows are contiguous."""
        last = self.active - 1
        self.pages.leave(row)
        if row != last:
            for cached in self.keys + self.values:
                cached[row] = cached[last]
            self.prefixes[row], self.lengths[row] = self.prefixes[last], self.lengths[last]
        self.prefixes.pop()
        self.lengths.pop()
        if not self.prefixes:  # the learner may need the memory next
            self.span, self.keys, self.values, self._products, self._biases = 0, [], [], {}, {}

    def begin(self, counts: Sequence[int] | None = None) -> tuple[int, list[int]]:
        """Make room for ``counts`` new tokens of each row; None: one each. Return the number of lanes to run (padded)
        and the tokens' positions, row by row."""
        counts = counts or [1] * self.active
        self._fit_span(max(map(add, self.lengths, counts)))
        rows = padded(self.active)
        alone = max(counts) == 1  # then lanes are rows, and padding is computed like them
        lanes = Lanes([*counts, *[int(alone)] * (rows - self.active)], self.device)
        total = padded(len(lanes))
        padding = [0] * (total - sum(counts))
        places = [(self.prefixes[row], self.lengths[row] + i) for row in range(self.active) for i in range(counts[row])]
        self._lengths = torch.tensor([length for _, length in places] + padding, device=self.device)
        self._prompts = torch.tensor([prefix.length for prefix, _ in places] + padding, device=self.device)
        self._rows = torch.tensor(lanes.row, device=self.device)
        lengths = self._lengths[: len(self._rows)]
        self._written = self._rows, lengths // BLOCK, slice(None), lengths % BLOCK  # the places of the new tokens
        self._biases = {}
        if self.pages.index(lanes) or self._indexed_span != self.span:
            self._indexed_span, self._products = self.span, {}
            self._prompt_span = PAGE * max(map(len, self.pages.rows))
            blocks = self.span // BLOCK
            members = [(row, block, row * blocks + block) for row in range(rows) for block in range(blocks)]
            self._turns = lanes.turns(members, rows * blocks, 1)
        return total, [prefix.length + prefix.shift + length for prefix, length in places] + padding

    def commit(self, counts: Sequence[int] | None = None) -> None:
        """End a forward pass: of the new tokens of each row the first ``counts`` stay; None: one each. What lies behind
        them is overwritten later, and never seen."""
        self.lengths = list(map(add, self.lengths, counts or [1] * self.active))

    def _fit_span(self, needed: int) -> None:
        if needed <= self.span <= max(4 * needed, 4 * BLOCK) and self.keys:
            return
        if self.device.type != "cpu" and needed > self.span:
            needed = max(needed, 2 * self.span)  # a GPU's allocator keeps every size that was once requested
        self.span = -(-needed // BLOCK) * BLOCK
        first = self.prefixes[0]
        blocks = self.span // BLOCK
        self.keys = resized(self.keys, first.keys, (self.capacity, blocks), BLOCK)
        self.values = resized(self.values, first.values, (self.capacity, blocks), BLOCK)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the bias of scores, [lanes, 1, 1, prompt span + completion span]: 0 where a lane sees the key, -inf
        elsewhere. It is the same in all layers."""
        if (bias := self._biases.get(window)) is None:
            prompt_at = torch.arange(self._prompt_span, device=self.device)
            completion_at = torch.arange(self.span, device=self.device)
            lengths, prompts = self._lengths[:, None], self._prompts[:, None]
            prompt, completion = prompt_at < prompts, completion_at <= lengths
            if window is not None:
                prompt = prompt & (prompts + lengths - prompt_at < window)
                completion = completion & (lengths - completion_at < window)
            bias = torch.zeros(len(lengths), 1, 1, self._prompt_span + self.span, dtype=dtype, device=self.device)
            bias.masked_fill_(~torch.cat([prompt, completion], dim=1)[:, None, None], float("-inf"))
            self._biases[window] = bias
        return bias

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        (_, heads, lanes, width), kv_heads = query.shape, key.shape[1]
        written, rows = len(self._rows), padded(self.active)
        row_keys, row_values = self.keys[layer], self.values[layer]
        row_keys[self._written] = key[0].transpose(0, 1)[:written]
        row_values[self._written] = value[0].transpose(0, 1)[:written]
        q = query[0].transpose(0, 1).reshape(lanes * heads, width)
        products = self._products_of(q, value.shape[-1], lanes, kv_heads)
        tiles = [
            (kind.keys[layer][: len(kind.tiles)], kind.values[layer][: len(kind.tiles)])
            for kind in self.pages.kinds.values()
            for _ in kind.turns
        ]
        tiles += [(row_keys[:rows].flatten(0, 1), row_values[:rows].flatten(0, 1))] * len(self._turns)
        scores = products.scores(q, [keys for keys, _ in tiles]).to(score_dtype(q.dtype)).view(lanes, heads, 1, -1)
        p = softmax(scores, settings, self._bias(settings.window, scores.dtype)).to(row_values.dtype)
        out = products.results(p.reshape(lanes * heads, -1), [values for _, values in tiles])
        return out.view(1, lanes, heads, -1)

    def _products_of(self, queries: Tensor, value_width: int, lanes: int, kv_heads: int) -> Products:
        group = len(queries) // lanes // kv_heads
        key = kv_heads, group, queries.shape[-1], value_width
        if (products := self._products.get(key)) is None:
            parts = [(turn, PAGE, 0) for kind in self.pages.kinds.values() for turn in kind.turns]
            parts += [(turn, BLOCK, self._prompt_span) for turn in self._turns]
            split = partial(split_of, tokens=PAGE, like=queries, value_width=value_width)
            products = Products(parts, lanes, kv_heads, group, self._prompt_span + self.span, split)
            self._products[key] = products
        return products
