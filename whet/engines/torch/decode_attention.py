"""Attention with a KV cache, for sampling.

transformers calls :func:`attention` in every layer (registered under ``NAME``); the model's keyword ``whet_cache``
determines the kind of forward pass: :class:`Prefill` for packed prompts, or the uncached parts of prompts;
:class:`DecodeCache` for one new token of each row. A row is one completion in flight. Its keys are in two places: the
prompt's in a *tile* shared with other rows of the same prompt, the completion's in the row's part of the cache. The
softmax runs over both.

A row's result must not depend on other rows, to the bit. So the number of rows of every product is a multiple of four
(matrix kernels treat remainders differently), every padding is a multiple of ``BLOCK`` and is multiplied by an exact
zero, and padded keys come last in their part. A prompt's KV cache must not depend on how much of it was cached before
either: it is computed in tiles of one shape at fixed positions.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whet.engines.torch.prefix import Prefix
from whet.models.attention.dense import AttentionSettings, score_dtype, softmax

NAME = "whet_decode"
BLOCK = 64
ROWS = 16  # the number of rows of a forward pass is a multiple of this


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
    **_: Any,
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


def size_class(length: int) -> int:
    """Return the padded length of a prompt of ``length`` tokens: a function of the length alone, at most 1.5 times as
    large.

    >>> [size_class(n) for n in (1, 65, 129, 193, 300, 400)]
    [64, 128, 192, 256, 384, 512]
    """
    step = max(BLOCK, 1 << max((length - 1).bit_length() - 2, 0))
    return -(-length // step) * step


def _resized(old: list[Tensor], like: list[tuple[Tensor, ...]], rows: int, tokens: int) -> list[Tensor]:
    """Return the tensor of each layer, [rows, kv_heads, tokens, D], with the part of the old one that fits, and zeros.
    Each replaces the old one in its list at once, so that memory is freed early."""
    new = []
    for layer, (x, *_) in enumerate(like):
        target = x.new_zeros(rows, x.shape[0], tokens, x.shape[2])
        if old:
            kept = min(tokens, old[layer].shape[2])
            target[: len(old[layer]), :, :kept] = old[layer][:, :, :kept]
            old[layer] = target
        new.append(target)
    return new


class _Tiles:
    """Prompts of one size class. A tile is one prompt and up to ``places`` rows that continue it.

    keys per layer [tiles, kv_heads, length, D]. A group with more rows than places has several tiles; the number of
    places changes the speed, not the result.
    """

    def __init__(self, length: int, places: int) -> None:
        self.length, self.places = length, places
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.prefixes: list[Prefix] = []  # [tiles]
        self.rows: list[list[int]] = []  # [tiles][at most places]
        self.gather: Tensor | None = None  # [tiles * places] the row at each place; row 0 for empty places
        self.row_index = self.place_index = torch.empty(0)  # [members] rows and their places
        self.aligned = False  # every place is taken, by the row with its number

    def add(self, row: int, prefix: Prefix) -> None:
        self.gather = None
        for tile, rows in enumerate(self.rows):
            if self.prefixes[tile] is prefix and len(rows) < self.places:
                rows.append(row)
                return
        tile = len(self.rows)
        if not self.keys or tile == self.keys[0].shape[0]:
            self._grow(prefix, max(4, tile * 2))
        for packed, pieces in zip(self.keys + self.values, prefix.keys + prefix.values, strict=True):
            end = 0
            for piece in pieces:
                start, end = end, end + piece.shape[1]
                packed[tile, :, start:end] = piece
            packed[tile, :, end:] = 0
        self.prefixes.append(prefix)
        self.rows.append([row])

    def _grow(self, prefix: Prefix, tiles: int) -> None:
        self.keys = _resized(self.keys, prefix.keys, tiles, self.length)
        self.values = _resized(self.values, prefix.values, tiles, self.length)

    def remove(self, row: int) -> None:
        self.gather = None
        for tile, rows in enumerate(self.rows):
            if row in rows:
                rows.remove(row)
                if not rows:
                    self._drop(tile)
                return

    def _drop(self, tile: int) -> None:
        last = len(self.rows) - 1
        if tile != last:
            for packed in self.keys + self.values:
                packed[tile] = packed[last]
            self.rows[tile], self.prefixes[tile] = self.rows[last], self.prefixes[last]
        self.rows.pop()
        self.prefixes.pop()

    def rename(self, old: int, new: int) -> None:
        self.gather = None
        for rows in self.rows:
            if old in rows:
                rows[rows.index(old)] = new

    def index(self, device: torch.device, rows: int) -> None:
        """Compute the positions in the tiles for a forward pass over ``rows`` rows (padded)."""
        if self.gather is not None and (len(self.row_index) == rows or not self.aligned):
            return
        gather = [row for rows in self.rows for row in rows + [0] * (self.places - len(rows))]
        members = sorted((row, t * self.places + i) for t, rows in enumerate(self.rows) for i, row in enumerate(rows))
        self.gather = torch.tensor(gather, device=device)
        self.row_index = torch.tensor([row for row, _ in members], device=device)
        self.place_index = torch.tensor([place for _, place in members], device=device)
        self.aligned = members == [(i, i) for i in range(rows)] and len(gather) == rows

    def product(self, packed: Tensor, x: Tensor, transpose: bool) -> Tensor:
        """Multiply x [M, kv_heads, G, A] of all rows with their tiles' keys or values -> [members, kv_heads, G, B]."""
        tiles, places, (_, kv_heads, group, width) = len(self.rows), self.places, x.shape
        x = x if self.aligned else x.index_select(0, self.gather)  # type: ignore[arg-type]
        x = x.view(tiles, places, kv_heads, group, width).transpose(1, 2)
        other = packed[:tiles].flatten(0, 1)
        y = torch.bmm(x.reshape(tiles * kv_heads, places * group, width), other.transpose(1, 2) if transpose else other)
        y = y.view(tiles, kv_heads, places, group, -1).transpose(1, 2).flatten(0, 1)
        return y if self.aligned else y.index_select(0, self.place_index)


class DecodeCache:
    """The KV cache of rows ``0 .. active - 1``, each with a (shared) prompt and the tokens of its completion.

    A completion's keys per layer: [capacity, kv_heads, span, D], where ``span`` grows in blocks: batched products are
    fast only on tensors without gaps. Use: ``join`` and ``leave`` change the rows, ``begin`` starts a forward pass of
    one token per row.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = -(-capacity // ROWS) * ROWS
        self.device = device
        self.prefixes: list[Prefix] = []  # [active]
        self.lengths: list[int] = []  # [active] completion tokens in the cache
        self.span = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.tiles: dict[int, _Tiles] = {}
        self.padded = 0  # rows of the current forward pass
        self._biases: dict[int | None, Tensor] = {}
        self._scores: dict[tuple[int, ...], Tensor] = {}

    @property
    def active(self) -> int:
        return len(self.prefixes)

    def join(self, prefixes: Iterable[Prefix]) -> None:
        """Add rows at the end, in this order, without completion tokens."""
        for prefix in (new := list(prefixes)):
            self.prefixes.append(prefix)
            self.lengths.append(0)
        self._choose_places()
        for row in range(self.active - len(new), self.active):
            prefix = self.prefixes[row]
            self.tiles[size_class(prefix.length)].add(row, prefix)

    def _choose_places(self) -> None:
        """Create tiles for new size classes, as wide as the number of rows per prompt suggests."""
        classes: dict[int, list[int]] = {}
        for prefix in self.prefixes:
            classes.setdefault(size_class(prefix.length), []).append(id(prefix))
        for length, members in classes.items():
            if length not in self.tiles:
                each = len(members) / len(set(members))
                self.tiles[length] = _Tiles(length, 16 if each > 12 else 8 if each > 6 else 4)

    def leave(self, row: int) -> None:
        """Drop a finished row. The last row takes its number, so that rows are contiguous."""
        last = self.active - 1
        tiles = self.tiles[size_class(self.prefixes[row].length)]
        tiles.remove(row)
        if not tiles.rows:
            del self.tiles[tiles.length]
        if row != last:
            self.tiles[size_class(self.prefixes[last].length)].rename(last, row)
            for cached in self.keys + self.values:
                cached[row, :, : self.lengths[last]] = cached[last, :, : self.lengths[last]]
            self.prefixes[row], self.lengths[row] = self.prefixes[last], self.lengths[last]
        self.prefixes.pop()
        self.lengths.pop()
        if not self.prefixes:  # the learner may need the memory next
            self.span, self.keys, self.values, self._scores, self._biases = 0, [], [], {}, {}

    def begin(self) -> tuple[int, list[int]]:
        """Make room for one token per row. Return the number of rows to run (padded) and the tokens' positions."""
        self.padded = -(-self.active // ROWS) * ROWS
        self._fit_span(max(self.lengths) + 1)
        padding = [0] * (self.padded - self.active)
        self._lengths = torch.tensor(self.lengths + padding, device=self.device)
        self._prompts = torch.tensor([p.length for p in self.prefixes] + padding, device=self.device)
        self._rows = torch.arange(self.padded, device=self.device)
        self._biases = {}
        for tiles in self.tiles.values():
            tiles.index(self.device, self.padded)
        self._prompt_span = max(self.tiles)
        self._scores = {}
        return self.padded, [p.length + p.shift + n for p, n in zip(self.prefixes, self.lengths, strict=True)] + padding

    def commit(self) -> None:
        """End a forward pass: each row has one more token."""
        self.lengths = [length + 1 for length in self.lengths]

    def _fit_span(self, needed: int) -> None:
        if needed <= self.span <= max(4 * needed, 4 * BLOCK) and self.keys:
            return
        if self.device.type != "cpu" and needed > self.span:
            needed = max(needed, 2 * self.span)  # a GPU's allocator keeps every size that was once requested
        self.span = -(-needed // BLOCK) * BLOCK
        first = self.prefixes[0]
        self.keys = _resized(self.keys, first.keys, self.capacity, self.span)
        self.values = _resized(self.values, first.values, self.capacity, self.span)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the bias of scores, [M, 1, 1, prompt span + completion span]: 0 where a row sees the key, -inf
        elsewhere. It is the same in all layers."""
        if (bias := self._biases.get(window)) is None:
            prompt_at = torch.arange(self._prompt_span, device=self.device)
            completion_at = torch.arange(self.span, device=self.device)
            lengths, prompts = self._lengths[:, None], self._prompts[:, None]
            prompt, completion = prompt_at < prompts, completion_at <= lengths
            if window is not None:
                prompt = prompt & (prompts + lengths - prompt_at < window)
                completion = completion & (lengths - completion_at < window)
            bias = torch.zeros(self.padded, 1, 1, self._prompt_span + self.span, dtype=dtype, device=self.device)
            bias.masked_fill_(~torch.cat([prompt, completion], dim=1)[:, None, None], float("-inf"))
            self._biases[window] = bias
        return bias

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        rows, span = self.padded, self.span
        row_keys, row_values = self.keys[layer], self.values[layer]
        row_keys[self._rows, :, self._lengths] = key[0].transpose(0, 1)
        row_values[self._rows, :, self._lengths] = value[0].transpose(0, 1)
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
        group = heads // kv_heads
        q = query[0].transpose(0, 1).reshape(rows, kv_heads, group, width)

        shape = (rows, kv_heads, group, self._prompt_span + span)
        if (scores := self._scores.get(shape)) is None:  # every layer overwrites the scores of the layer before
            scores = self._scores[shape] = torch.zeros(shape, dtype=score_dtype(q.dtype), device=q.device)
        row_scores = torch.bmm(q.flatten(0, 1), row_keys[:rows].flatten(0, 1).transpose(1, 2))
        scores[..., self._prompt_span :] = row_scores.view(rows, kv_heads, group, span)
        for tiles in self.tiles.values():
            seen = tiles.product(tiles.keys[layer], q, True)
            if tiles.aligned:
                scores[..., : tiles.length] = seen
            else:
                scores[tiles.row_index, :, :, : tiles.length] = seen.to(scores.dtype)

        bias = self._bias(settings.window, scores.dtype)
        p = softmax(scores.view(rows, heads, 1, -1), settings, bias).view(shape).to(row_values.dtype)
        row_p = p[..., self._prompt_span :].reshape(rows * kv_heads, group, span)
        out = torch.bmm(row_p, row_values[:rows].flatten(0, 1)).view(rows, kv_heads, group, -1)
        for tiles in self.tiles.values():
            seen = tiles.product(tiles.values[layer], p[..., : tiles.length], False)
            if tiles.aligned:
                out += seen
            else:
                out.index_add_(0, tiles.row_index, seen)
        return out.view(1, rows, heads, -1)
