"""Log-probs of chosen tokens by tiles of [tokens, words], with a custom backward pass; the implementation of ``head``.

On a GPU, the backward pass recomputes each tile's products. That costs a third more products, and saves only a few
numbers per token between the passes, independent of the size of the vocabulary. On a CPU in float32, where products
take most of a step, the products of the first tokens are kept, up to ``KEPT_BYTES``. If the vocabulary is sharded over
ranks, each works on its words, and a few numbers per token are reduced.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.core.types import Distribution
from whet.models.distribution import least_logit, truncates
from whet.models.shards import WHOLE, Vocabulary

KEPT_BYTES = 2**30  # maximum size of the products that a CPU keeps for a backward pass


@dataclass(slots=True, frozen=True)
class Tiles:
    """The sizes of tiles."""

    tokens: int
    words: int  # words of the vocabulary: products of this size run at full speed
    sorted: int  # tokens, if truncation or top-k needs the whole vocabulary of each


def tiles_on(device: torch.device) -> Tiles:
    """Return the sizes for a device: on a GPU every operation takes some microseconds to start."""
    return Tiles(1024, 2048, 128) if device.type == "cpu" else Tiles(4096, 16384, 1024)


def products(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T, on GPUs in float32 for half precision too: rounded to half precision, logits of 16 and
    more have errors up to 1/16."""
    if rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    return rows @ weight.T


@dataclass(slots=True, frozen=True)
class HeadSettings:
    """The map from products to the logits of the distribution, tile by tile."""

    distribution: Distribution
    scale: float
    softcap: float | None
    vocabulary: Vocabulary = WHOLE.vocabulary

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a tile's logits, and tanh of the capped ones."""
        return self.finish(products(rows, weight), bias)

    def finish(self, products: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scale, cap and temper products, in float32 or wider, in place."""
        logits = products if products.dtype == torch.float64 else products.float()
        if bias is not None:
            logits = logits.add_(bias)
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        capped = None
        if self.softcap is not None:
            capped = logits.div_(self.softcap).tanh_()
            logits = capped * self.softcap
        if self.distribution.temperature != 1.0:
            logits = logits.div_(self.distribution.temperature)
        return logits, capped

    def truncate_(self, logits: Tensor, floor: Tensor, column: Tensor, here: Tensor) -> Tensor:
        """Set logits outside the support to -inf, in place; the target tokens are always inside. Return the
        argument."""
        if not truncates(self.distribution):
            return logits
        target = torch.zeros_like(logits).scatter_add_(-1, column, here.to(logits.dtype))
        return logits.masked_fill_((logits < floor[:, None]) & (target == 0), float("-inf"))


def _spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _locate(ids: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the ids' indices in a tile of the vocabulary, and a mask of the ids in it. [T, K] each"""
    here = (ids >= tile.start) & (ids < tile.stop)
    return (ids - tile.start).clamp(0, tile.stop - tile.start - 1), here


class TokenLogprobs(torch.autograd.Function):
    """Both passes work on tiles of [chunk tokens, some words]. Saves the inputs, a few numbers per token and, if it
    ``keeps`` and computes in float32 or wider, the products of the first tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        how: HeadSettings,
        with_entropy: bool,
        chunk: int | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        ctx.compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        sizes = tiles_on(hidden.device)
        chunk = chunk or sizes.tokens
        chunk = min(chunk, sizes.sorted) if truncates(how.distribution) else chunk
        ctx.how, ctx.with_entropy, ctx.chunk = how, with_entropy, chunk
        wide = torch.float64 if ctx.compute == torch.float64 else torch.float32
        least = torch.finfo(wide).min
        kept: list[Tensor] = []
        room = KEPT_BYTES if keeps and ctx.compute == wide else 0
        logprobs = hidden.new_zeros(ids.shape, dtype=wide)
        normaliser, entropy, floor = (hidden.new_full((len(hidden),), least, dtype=wide) for _ in range(3))
        with torch.autocast(kind, enabled=False):
            narrow = weight.to(ctx.compute)
            tiles = _spans(len(narrow), sizes.words)
            for part in _spans(len(hidden), chunk):
                rows, targets = hidden[part].to(ctx.compute), ids[part] - how.vocabulary.start
                if truncates(how.distribution):
                    whole = torch.cat([how.logits(rows, narrow[tile], _of(bias, tile))[0] for tile in tiles], dim=1)
                    floor[part] = least_logit(how.vocabulary.all_gather(whole), how.distribution)[:, 0]
                    del whole
                total, mean = normaliser[part], torch.zeros_like(normaliser[part])
                room -= len(rows) * len(narrow) * ctx.compute.itemsize
                for tile in tiles:
                    tiled = products(rows, narrow[tile])
                    if room >= 0:
                        kept.append(tiled)
                        tiled = tiled.clone()
                    logits, _ = how.finish(tiled, _of(bias, tile))
                    column, here = _locate(targets, tile)
                    logprobs[part] += torch.where(here, logits.gather(-1, column), 0.0)
                    how.truncate_(logits, floor[part], column, here)
                    grown = torch.logaddexp(total, logits.logsumexp(-1))
                    if with_entropy:
                        shares = (logits - grown[:, None]).exp_()
                        mean = mean * (total - grown).exp() + shares.mul_(logits.clamp_(min=least)).sum(-1)
                    total = grown
                # Over all ranks: the largest normaliser first, so that no sum of exponentials overflows.
                top = how.vocabulary.max(total)
                share = (total - top).exp()
                sums = how.vocabulary.sum(torch.cat([logprobs[part], share[:, None], (share * mean)[:, None]], 1))
                normaliser[part] = top + sums[:, -2].log()
                logprobs[part] = sums[:, :-2] - normaliser[part, None]
                entropy[part] = normaliser[part] - sums[:, -1] / sums[:, -2]
        ctx.save_for_backward(hidden, weight, bias, ids, normaliser, entropy, floor, *kept)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, normaliser, entropy, floor, *kept = ctx.saved_tensors
        ready = iter(kept)
        of_logprobs, of_entropy = grads
        how, wide = ctx.how, normaliser.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = hidden.new_zeros(hidden.shape, dtype=wide) if wants_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=wide) if wants_weight else None
        d_bias = bias.new_zeros(bias.shape, dtype=wide) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(ctx.compute)
            for part in _spans(len(hidden), ctx.chunk):
                rows, of_chosen = hidden[part].to(ctx.compute), of_logprobs[part]
                to_all = of_chosen.sum(-1, keepdim=True).neg_()
                for tile in _spans(len(narrow), tiles_on(hidden.device).words):
                    tiled = next(ready, None)
                    tiled = products(rows, narrow[tile]) if tiled is None else tiled.clone()
                    logits, capped = how.finish(tiled, _of(bias, tile))
                    column, here = _locate(ids[part] - how.vocabulary.start, tile)
                    scores = how.truncate_(logits, floor[part], column, here).sub_(normaliser[part, None])
                    if ctx.with_entropy:
                        shares = scores.exp()
                        surprise = scores.masked_fill_(scores == float("-inf"), 0.0).add_(entropy[part, None])
                        d_logits = surprise.mul_(-of_entropy[part, None]).add_(to_all).mul_(shares)
                    else:
                        d_logits = scores.exp_().mul_(to_all)
                    d_logits.scatter_add_(-1, column, torch.where(here, of_chosen, 0.0))
                    if capped is not None:
                        d_logits.mul_(capped.square_().neg_().add_(1.0))
                    if how.scale != how.distribution.temperature:
                        d_logits.mul_(how.scale / how.distribution.temperature)
                    d_raw = d_logits.to(ctx.compute)
                    if d_hidden is not None:
                        d_hidden[part] += d_raw @ narrow[tile]
                    if d_weight is not None:
                        d_weight[tile] += d_raw.T @ rows
                    if d_bias is not None:
                        d_bias[tile] += d_logits.sum(0)
        return (
            None if d_hidden is None else how.vocabulary.sum(d_hidden).to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *[None] * 5,
        )


def _of(bias: Tensor | None, tile: slice) -> Tensor | None:
    return None if bias is None else bias[tile]
