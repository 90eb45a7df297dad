"""Sampling of tokens from logits: the sampling distribution, and one draw per row.

Every row is treated separately, in float32 or float64, with one uniform number in [0, 1) from its request's stream: the
token is a function of the row's logits, its ``Distribution`` and that number.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from whet.core.types import Distribution
from whet.models.distribution import least_logit, truncates

CHUNK = 256  # probabilities are summed in chunks; a draw first selects a chunk, then a token in it
_ROWS = 16  # rows processed at once, so that their logits stay in the processor's cache
_HEAD = 256  # candidates that nucleus sampling tries before it sorts the whole vocabulary


def uniform_stream(seed: int, count: int) -> np.ndarray:
    """Return [count] float64 in [0, 1): the uniform numbers of one request, from a counter-based generator (Philox)."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def thresholds(x: Tensor, distribution: Distribution) -> Tensor:
    """Return ``least_logit`` [N, 1] of rows x [N, V], without sorting the whole vocabulary if a part is enough."""
    floor = least_logit(x, replace(distribution, top_p=1.0))
    if distribution.top_p == 1.0:
        return floor
    rows = [_nucleus_floor(row, least, distribution) for row, least in zip(x, floor, strict=True)]
    return torch.maximum(floor, torch.stack(rows)[:, None])


def _nucleus_floor(row: Tensor, floor: Tensor, distribution: Distribution) -> Tensor:
    """Return the logit of the last of the most likely tokens whose mass, among tokens from ``floor`` up, reaches
    ``top_p``."""
    descending = row.topk(min(_HEAD, len(row))).values
    likeliest = descending[0]
    total = torch.where(row >= floor, (row - likeliest).double().exp(), 0).sum()
    kept = int(((descending - likeliest).double().exp().cumsum(0) < distribution.top_p * total).sum())
    return descending[kept] if kept < len(descending) else least_logit(row[None], distribution)[0, 0]


def sample_tokens(
    logits: Tensor, uniforms: Sequence[float], distributions: Sequence[Distribution], greedy: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """Return one token per row and its log-prob under the row's distribution (temperature and filters applied).

    ``logits`` [N rounded up to a multiple of 16, V]: kernels treat a last, incomplete vector differently, in the last
    bit, so rows come in whole blocks, and rows beyond N are padding. The other arguments have N entries. A greedy row
    takes the most likely token, with its log-prob at temperature 1 without filters.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    for start in range(0, len(uniforms), _ROWS):
        part = slice(start, start + _ROWS)
        plain = [Distribution() if g else d for d, g in zip(distributions[part], greedy[part], strict=True)]
        chosen, their = _sample_block(logits[part], list(uniforms[part]), plain, list(greedy[part]))
        tokens += chosen.tolist()
        logprobs += their.tolist()
    return tokens, logprobs


def likeliest_tokens(logits: Tensor, count: int, among: Sequence[int] = ()) -> dict[int, float]:
    """Return the ``count`` likeliest tokens of logits [V], the likeliest first, or the tokens ``among``, with their
    log-probs at temperature 1 without filters."""
    x = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    if among:
        return dict(zip(among, x[list(among)].tolist(), strict=True))
    values, tokens = x.topk(min(count, len(x)))
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


def _sample_block(
    logits: Tensor, uniforms: list[float], distributions: list[Distribution], greedy: list[bool]
) -> tuple[Tensor, Tensor]:
    count, (rows, vocab) = len(uniforms), logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    x = torch.empty(rows, -(-vocab // CHUNK) * CHUNK, dtype=dtype, device=logits.device)
    x[:, :vocab] = logits
    x[:, vocab:] = float("-inf")  # whole chunks, so that kernels treat all parts of a row alike
    if any(d.temperature != 1.0 for d in distributions):
        temperature = [d.temperature for d in distributions] + [1.0] * (rows - count)
        x /= torch.tensor(temperature, dtype=dtype, device=x.device)[:, None]
    likeliest = x.amax(dim=-1, keepdim=True)
    kept: Tensor | None = None
    if any(truncates(d) for d in distributions):
        floor = torch.full((rows, 1), float("-inf"), dtype=dtype, device=x.device)
        for d in set(filter(truncates, distributions)):
            same = torch.tensor([i for i, other in enumerate(distributions) if other == d], device=x.device)
            floor[same] = thresholds(x[same, :vocab], d)
        kept = x >= floor
    x -= likeliest
    mass = x.exp()
    if kept is not None:
        mass *= kept
    draw = torch.tensor(uniforms + [0.0] * (rows - count), dtype=torch.float64, device=x.device)
    token, total = _draw(mass, draw)
    if any(greedy):
        chosen = torch.tensor(greedy + [False] * (rows - count), device=x.device)
        token = torch.where(chosen, x.argmax(dim=-1), token)
    logprob = x.gather(1, token[:, None])[:, 0].double() - total.log()
    return token[:count], logprob[:count].float()


def _draw(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [N] and the sums of the rows [N] in float64, from mass [N, whole chunks] (unnormalised) and uniform
    [N].

    Inverts the cumulative distribution in two stages; a token without mass is never drawn.
    """
    chunks = mass.view(len(mass), -1, CHUNK)
    upto = chunks.sum(-1, dtype=mass.dtype).double().cumsum(1)
    total = upto[:, -1].clone()
    chunk = _first_beyond(upto, uniform * total)
    before = torch.where(chunk > 0, upto.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = chunks[torch.arange(len(mass), device=mass.device), chunk].double().cumsum(1)
    return chunk * CHUNK + _first_beyond(inside, uniform * total - before), total


def _first_beyond(upto: Tensor, target: Tensor) -> Tensor:
    """Return the first index [N] whose cumulative mass ``upto`` [N, K] exceeds ``target`` [N]; at most the last index
    with mass."""
    place = torch.searchsorted(upto, target[:, None], right=True)
    last = torch.searchsorted(upto, upto[:, -1:].contiguous()).clamp_(max=upto.shape[1] - 1)  # the clamp is for nan
    return torch.minimum(place, last)[:, 0]
