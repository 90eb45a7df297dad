"""Forest attention by torch's FlexAttention (arXiv 2412.05496), for GPUs: one kernel over a batch's packed tokens. No
block is padded, no key is copied for an answer.

A batch is laid out in preorder: each segment is followed by its descendants. So one number for each token is the whole
mask: query q sees key k where ``k <= q < end[k]``, and ``end[k]`` is the first token that does not descend from k's
segment. Tiles of the mask are found from the smallest and largest ``end`` of each, never from N x N pairs.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from whet.errors import ConfigError
from whet.models.config import AttentionName
from whet.models.dense_attention import AttentionSettings
from whet.models.device import placed

log = logging.getLogger(__name__)

TILE = 128  # tokens of the kernel's tiles; a batch is filled up to a multiple of it


@dataclass(slots=True)
class FlexLayout:
    """The mask of a batch of ``size`` tokens, with padding P of them. Made once per batch."""

    size: int
    end: Tensor  # [P] int32
    depth: Tensor  # [P] int32: tokens before it on its path
    masks: dict[int | None, BlockMask] = field(default_factory=dict)  # by window

    @classmethod
    def of(cls, starts: Sequence[int], parents: Sequence[int], size: int, device: torch.device) -> "FlexLayout | None":
        """Return the layout of segments; None where they are in another order."""
        ends = [*starts[1:], size]
        before = [0] * len(starts)
        last = list(ends)
        for i in reversed(range(len(starts))):
            if parents[i] >= 0:
                last[parents[i]] = max(last[parents[i]], last[i])
        open_: list[int] = []  # segments whose descendants may still come
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
        """Return which key each query sees; with a ``window``, of its own path's last so many tokens."""
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
    """Return how many tiles of keys each tile of queries has, and their numbers first."""
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
    """Compile it, once in a process and for batches of any size; that takes up to a minute. On a CPU it is plain
    operations on all pairs, without a backward pass: for tests."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=True) if kind == "cuda" else kernel


def choose_flex(wanted: AttentionName, model: nn.Module, device: torch.device, *, half: bool, spread: bool) -> bool:
    """Return whether to use it for a model that computes on ``device``, in ``half`` precision or not. ``spread``: a
    batch's tokens are over several ranks. Raises ``ConfigError`` where it is wanted and can't be used."""
    config: Any = model.config
    text = config.get_text_config()
    problem = None
    if device.type != "cuda":
        problem = "it has no backward pass on CPUs"
    elif spread:
        problem = "parallel.context spreads a batch's tokens"
    elif getattr(text, "attention_dropout", 0.0) or any(name.endswith("sinks") for name, _ in model.named_parameters()):
        problem = f"{type(model).__name__} has dropout in its attention, or sinks"
    if wanted == "flex" and problem is not None:
        raise ConfigError(f"learner.attention = flex, and {problem}; set learner.attention=auto")
    if wanted == "blocks" or problem is not None:
        return False
    return wanted == "flex" or (half and _works(text, device))


def _works(text: Any, device: torch.device) -> bool:
    """Try it: whether this machine compiles it, and its results and gradients are those of plain operations."""
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    random = torch.Generator(device).manual_seed(0)
    layout = FlexLayout.of([0, 100, 190, 250], [-1, 0, 0, -1], 300, device)
    assert layout is not None
    inputs = [
        torch.randn(1, count, 300, size, generator=random, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, shared, shared)
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    try:
        out = layout.attend(*inputs, AttentionSettings(size**-0.5))  # type: ignore[arg-type, call-arg]
        found = torch.autograd.grad(out.sum(), inputs)
    except Exception as error:  # of the compiler, of any kind
        log.warning("learner.attention: FlexAttention does not run here, so blocks are used: %s", error)
        return False
    key, value = (x.repeat_interleave(heads // shared, 1) for x in wide[1:])
    at = torch.arange(300, device=device)
    sees = (at <= at[:, None]) & (at[:, None] < layout.end[:300])
    plain = nn.functional.scaled_dot_product_attention(wide[0], key, value, sees, scale=size**-0.5).transpose(1, 2)
    right = [plain, *torch.autograd.grad(plain.sum(), wide)]
    pairs = zip([out.detach(), *found], [x.detach() for x in right], strict=True)
    off = [float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-9)) for ours, exact in pairs]
    if max(off) > 0.02:
        log.warning("learner.attention: FlexAttention is off by %.2g here, so blocks are used", max(off))
    return max(off) <= 0.02
