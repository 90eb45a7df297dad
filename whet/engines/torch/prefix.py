"""The KV cache of a prompt, for the rows and prompts that continue it, and the forward pass that fills it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from whet.core.expert_ids import Ids
from whet.models.attention.dense import AttentionSettings, fused_attention, score_dtype, softmax
from whet.models.attention.layout import Ahead
from whet.models.device import placed

TILE = 64  # queries, and keys, of a product of the forward pass


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
            keys, values = torch.cat(prefix.keys[layer], dim=1), torch.cat(prefix.values[layer], dim=1)
            later = None if ahead is None else ahead[part]
            out[0, part] = _causal(query[0, :, part], keys, values, settings, later)
            start = part.stop
        return out


def _causal(q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings, ahead: Tensor | None = None) -> Tensor:
    """Return attention of the last tokens of a prompt to all of it, q [heads, N, D], k and v [kv_heads, length, D] ->
    [N, heads, Dv]. ``ahead``, [N] on the CPU: how many later tokens each sees. Every product has the same shape, and a
    token the same place in it, for any N; on a GPU it is one operation, whose last digits may differ."""
    (heads, new, width), (kv_heads, length, _), exact = q.shape, k.shape, score_dtype(q.dtype)
    first, pad = length - new, nn.functional.pad
    if q.device.type != "cpu" and settings.softcap is None and settings.sinks is None:
        whole = first == 0 and (settings.window is None or length <= settings.window) and ahead is None
        mask = None if whole else _visible(first, length, length, settings.window, q.device, ahead)
        return fused_attention(q[None], k[None], v[None], mask, settings.scale)[0].transpose(0, 1)
    tiles = pad(q, (0, 0, first % TILE, -length % TILE)).to(exact).view(heads, -1, TILE, width).transpose(0, 1)
    keys, values = (pad(x, (0, 0, 0, -length % TILE)).to(exact).split(TILE, dim=1) for x in (k, v))
    later = None if ahead is None else pad(ahead, (first % TILE, -length % TILE)).split(TILE)
    outs = []
    for index, tile in enumerate(tiles):
        start = (first // TILE + index) * TILE
        end = last = start + TILE
        if later is not None:
            last = max(end, start + 1 + int((torch.arange(TILE) + later[index]).max()))
        seen = range(-(-last // TILE))
        queries = tile.reshape(kv_heads, -1, width)
        scores = torch.cat([queries @ keys[i].mT for i in seen], dim=-1).view(heads, TILE, -1)
        looks = None if later is None else later[index]
        hidden = ~_visible(start, end, scores.shape[-1], settings.window, q.device, looks)
        bias = torch.zeros_like(hidden, dtype=exact).masked_fill_(hidden, float("-inf"))
        p = softmax(scores, settings, bias).view(kv_heads, -1, scores.shape[-1]).split(TILE, dim=-1)
        out = p[0] @ values[0]
        for i in seen[1:]:
            out += p[i] @ values[i]
        outs.append(out.view(heads, TILE, -1))
    return torch.cat(outs, dim=1)[:, first % TILE :][:, :new].transpose(0, 1).to(q.dtype)


def _visible(
    start: int, end: int, length: int, window: int | None, device: torch.device, ahead: Tensor | None = None
) -> Tensor:
    """Return a mask of the keys that each query may see, [end - start, length]."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(length, device=device)
    seen = distance >= (0 if ahead is None else -placed(ahead, device)[:, None])
    return seen if window is None else seen & (distance < window)
