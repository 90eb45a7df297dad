"""The KV cache of a prompt, for the rows and prompts that continue it, and the forward pass that fills it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from whet.core.expert_ids import Ids
from whet.models.attention.dense import AttentionSettings, fused_attention, score_dtype, softmax
from whet.models.attention.layout import Ahead
from whet.models.device import placed

TILE = 32  # queries of a product of the forward pass


@dataclass(slots=True)
class Prefix:
    """The keys and values of one prompt, in consecutive pieces: prompts with a common prefix share its pieces. Never
    changes once filled."""

    length: int
    keys: list[tuple[Tensor, ...]] = field(default_factory=list)  # per layer pieces [kv_heads, tokens, D]
    values: list[tuple[Tensor, ...]] = field(default_factory=list)  # per layer pieces [kv_heads, tokens, Dv]
    experts: Ids | None = None  # [length, layers, k], if recorded
    shift: int = 0  # the position of the next token minus ``length``; see whet.models.image_processor

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values, with the pieces that are shared."""
        return sum(piece.nbytes for layer in (*self.keys, *self.values) for piece in layer)

    def first(self, length: int) -> "Prefix":
        """Return the prefix of the first tokens, without copying a piece that is mostly used."""
        experts = None if self.experts is None else self.experts[:length]
        keys, values = ([_first(pieces, length) for pieces in layers] for layers in (self.keys, self.values))
        return Prefix(length, keys, values, experts)


def _first(pieces: tuple[Tensor, ...], length: int) -> tuple[Tensor, ...]:
    kept: list[Tensor] = []
    for piece in pieces:
        if length <= 0 and kept:
            break
        part = piece[:, :length]
        # a view would keep alive much more memory than it needs
        little = 2 * part.nbytes < piece.untyped_storage().nbytes()
        kept.append(part.clone() if little else part)
        length -= part.shape[1]
    return tuple(kept)


class Prefill:
    """A forward pass over several packed prompts, for each the tokens after its ``cached`` prefix; fills one
    :class:`Prefix` for each.

    Each prompt attends to itself only, so its result is the same as for the prompt alone.
    """

    def __init__(self, lengths: Sequence[int], cached: Sequence[Prefix], ahead: Ahead | None = None) -> None:
        """``ahead``: the later tokens that the new tokens of all prompts see. A cached prefix doesn't end among
        them."""
        self.prefixes = [Prefix(length) for length in lengths]
        self.cached = cached
        self.ahead = ahead

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        ahead = None if self.ahead is None else self.ahead.of_layer(settings.window)
        start = 0
        for prefix, cached in zip(self.prefixes, self.cached, strict=True):
            if len(prefix.keys) != layer:
                raise RuntimeError(f"attention layer {layer} was called as number {len(prefix.keys)}")
            part = slice(start, start + prefix.length - cached.length)
            before = (cached.keys[layer], cached.values[layer]) if cached.length else ((), ())
            prefix.keys.append((*before[0], key[0, :, part].clone(memory_format=torch.contiguous_format)))
            prefix.values.append((*before[1], value[0, :, part].clone(memory_format=torch.contiguous_format)))
            later = None if ahead is None else ahead[part]
            out[0, part] = _causal(query[0, :, part], prefix.keys[layer], prefix.values[layer], settings, later)
            start = part.stop
        return out


def _causal(
    q: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    settings: AttentionSettings,
    ahead: Tensor | None = None,
) -> Tensor:
    """Return attention of the last tokens of a prompt to all of it, q [heads, N, D] and pieces of keys and values
    [kv_heads, tokens, D] -> [N, heads, Dv]. ``ahead``, [N] on the CPU: how many later tokens each sees. The shape of
    each product depends on the place of its queries in the prompt alone, and not on N; on a GPU it is one operation,
    whose last digits may differ."""
    (heads, new, width), kv_heads = q.shape, len(keys[0])
    length = sum(piece.shape[1] for piece in keys)
    first, pad = length - new, nn.functional.pad
    if q.device.type != "cpu" and settings.softcap is None and settings.sinks is None:
        whole = first == 0 and (settings.window is None or length <= settings.window) and ahead is None
        mask = None if whole else ~_hidden(first, new, length, settings.window, q.device, ahead)
        k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        return fused_attention(q[None], k[None], v[None], mask, settings.scale)[0].transpose(0, 1)
    exact = score_dtype(q.dtype)
    tiles = pad(q, (0, 0, first % TILE, -length % TILE)).to(exact).view(heads, -1, TILE, width).transpose(0, 1)
    k, v = _joined(keys, length, exact), _joined(values, length, exact)
    later = None if ahead is None else pad(ahead, (first % TILE, -length % TILE)).split(TILE)
    outs = []
    for index, tile in enumerate(tiles):
        start = (first // TILE + index) * TILE
        seen = start + TILE
        if later is None:
            bias = _bias(start, settings.window, q.device, exact)
        else:
            last = int((torch.arange(start, seen) + later[index]).max()) + 1
            seen = -(-max(last, seen) // TILE) * TILE
            bias = _masked(_hidden(start, TILE, seen, settings.window, q.device, later[index]), exact)
        scores = (tile.reshape(kv_heads, -1, width) @ k[:, :seen].mT).view(heads, TILE, seen)
        p = softmax(scores, settings, bias).view(kv_heads, -1, seen)
        outs.append((p @ v[:, :seen]).view(heads, TILE, -1))
    return torch.cat(outs, dim=1)[:, first % TILE :][:, :new].transpose(0, 1).to(q.dtype)


def _joined(pieces: Sequence[Tensor], length: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values in one tensor, with zeros up to a multiple of a tile."""
    kv_heads, _, width = pieces[0].shape
    joined = pieces[0].new_empty((kv_heads, -(-length // TILE) * TILE, width), dtype=dtype)
    start = 0
    for piece in pieces:
        joined[:, start : start + piece.shape[1]] = piece
        start += piece.shape[1]
    joined[:, length:] = 0
    return joined


@lru_cache(maxsize=8)  # most prompts of a step end at similar places, and all layers have the same masks
def _bias(start: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _masked(_hidden(start, TILE, start + TILE, window, device), dtype)


def _masked(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _hidden(
    start: int, queries: int, keys: int, window: int | None, device: torch.device, ahead: Tensor | None = None
) -> Tensor:
    """Return a mask [queries, keys] of the keys that a query, the first of them at ``start``, does not see."""
    distance = torch.arange(start, start + queries, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = distance < (0 if ahead is None else -placed(ahead, device)[:, None])
    return hidden if window is None else hidden | (distance >= window)
