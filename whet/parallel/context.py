"""Context parallelism: the tokens of one packed batch are split over ranks, with exact results.

Each rank computes its own queries; keys and values are gathered from all ranks. Of 2R pieces of a batch, rank r of R
has the pieces r and 2R-1-r, so that late tokens, which attend to more, are balanced (both as in Llama 3, arXiv
2407.21783). Hidden states are gathered before the head, because the predictor of a token may be on another rank; then
each rank computes the log-probs of its slice of the trained tokens. Independent of the model.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whet.models.shards import Tokens

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SpreadTokens(Tokens):
    """``Tokens`` split over the ranks of ``group``. Between matrices a rank has one of ``parts`` equal parts of its
    tokens."""

    spread = True

    def __init__(self, group: dist.ProcessGroup, parts: int = 1, part: int = 0) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.multiple, self.parts, self.part = 2 * self.ranks * parts, parts, part

    def runs(self, tokens: int) -> list[range]:
        size = tokens // (2 * self.ranks)
        return [range(piece * size, (piece + 1) * size) for piece in (self.rank, 2 * self.ranks - 1 - self.rank)]

    def between_matrices(self, tokens: int) -> slice:
        return _part(tokens, self.parts, self.part)

    def gather(self, rows: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(rows, self.group)
        return gathered

    def local_slice(self, rows: Tensor) -> Tensor:
        return rows[self.rank :: self.ranks]

    def all_reduce(self, column: Tensor) -> Tensor:
        combined: Tensor = _Combine.apply(column, self.group)
        return combined


class TokensInParts(Tokens):
    """``Tokens`` that are all on this rank, of which it has one of ``parts`` equal parts between matrices: sequence
    parallelism."""

    def __init__(self, parts: int, part: int) -> None:
        self.multiple, self.part = parts, part

    def between_matrices(self, tokens: int) -> slice:
        return _part(tokens, self.multiple, self.part)


def _part(tokens: int, parts: int, part: int) -> slice:
    size = tokens // parts
    return slice(part * size, (part + 1) * size)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ranks = group, group.size()
        parts = rows.new_empty(ranks * len(rows), *rows.shape[1:])
        _all_gather(parts, rows.contiguous(), group=group)
        early, late = parts.view(ranks, 2, len(rows) // 2, *rows.shape[1:]).unbind(1)
        return torch.cat([early, late.flip(0)]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, grad = ctx.group.size(), grads[0]
        early, late = grad.reshape(2, ranks, -1, *grad.shape[1:]).unbind(0)
        parts = torch.stack([early, late.flip(0)], 1)
        part = grad.new_empty(len(grad) // ranks, *grad.shape[1:])
        _reduce_scatter(part, parts.flatten(0, 2), group=ctx.group)
        return part, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, column: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = column.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None
