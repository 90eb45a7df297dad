"""The layout of a forest of segments for attention: rows of similar size are padded to one size, as a block, and
computed together."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.batch import Batch
from whet.core.forest import concat_aranges
from whet.models.device import placed
from whet.models.shards import Tokens

_PADDING = 1.25  # maximum ratio of a bin's query-key pairs, with padding, to the pairs that its rows need ...
_SLACK = 1 << 16  # ... plus this many pairs, which cost about as much as starting another block


def padded_segments(batch: Batch, tokens: Tokens) -> tuple[list[int], list[int], int]:
    """Return the start and the parent of each segment, and the number of all tokens. Padding that ``tokens`` requires
    is one more segment, a root."""
    size = tokens.padded(len(batch))
    more = size > len(batch)
    starts = [*batch.segment_start.tolist(), *[len(batch)] * more]
    return starts, [*batch.segment_parent.tolist(), *[-1] * more], size


@dataclass(slots=True, frozen=True)
class Ahead:
    """Tokens that also see later ones: in Gemma 3 and 4 each token of an image sees all of that image."""

    count: Tensor  # [N] how many later tokens each token sees; they are in its segment
    everywhere: bool  # in all layers; otherwise in those with a sliding window

    def reach(self, part: range) -> int:
        """Return the end of the tokens that a part of a segment sees."""
        counts = self.count[part.start : part.stop]  # without padding
        ends = torch.arange(part.start, part.start + len(counts)) + counts + 1
        return max(part.stop, int(ends.max())) if len(ends) else part.stop

    def of_layer(self, window: int | None) -> Tensor | None:
        """Return the count of a layer with this window; None if its tokens see no later ones."""
        return self.count if self.everywhere or window is not None else None


def ahead_in_runs(of_image: Tensor, starts: list[int]) -> Tensor:
    """Return how many tokens follow each token of an image in its run, [N], 0 for other tokens. ``of_image``, [N] bool;
    ``starts``: the first token of each segment, in which runs end."""
    size = len(of_image)
    last = torch.ones(size, dtype=torch.bool)  # of its run
    last[:-1] = ~of_image[1:]
    last[torch.tensor(starts[1:], dtype=torch.long) - 1] = True
    place = torch.arange(size)
    end = place.where(last, size).flip(0).cummin(0).values.flip(0)
    return (end - place).where(of_image, 0)


@dataclass(slots=True)
class Block:
    """C segments padded to one size. A row's keys are its ancestors' tokens, then its own, then padding.

    If a batch is distributed over ranks, a row is this rank's part of a segment; the segment's earlier tokens count as
    ancestors, and later tokens that the part sees are keys after its own.
    """

    rows: int  # C
    queries: int  # tokens of the longest segment
    keys: int  # of the longest row
    before: Tensor  # [C] tokens of the ancestors; equal in all rows if ``even``
    even: bool
    roots: bool  # no row has ancestors
    ahead: Ahead | None = None  # of its queries, [C, queries]; None: none sees a later token


@dataclass(slots=True)
class ForestLayout:
    """The indices of every block's queries and keys, and of every token's result. Built once per batch."""

    blocks: list[Block]
    query: "Gather"  # packed token (of this rank's) of each query row of all blocks
    key: "Gather"  # packed token (of all) of each key row of all blocks
    result: "Gather"  # query row of each packed token (of this rank's)
    tokens: Tokens = field(default_factory=Tokens)
    masks: dict[object, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, batch: Batch, device: torch.device | str, tokens: Tokens | None = None, ahead: Ahead | None = None
    ) -> "ForestLayout":
        """Return the layout of a batch, on the model's device. Padding that ``tokens`` requires is one more segment."""
        tokens = tokens or Tokens()
        return cls._of(*padded_segments(batch, tokens), device, tokens, ahead)

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device | str) -> "ForestLayout":
        """Return the layout of sequences of these lengths without shared tokens."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return cls._of(starts, [-1] * len(lengths), sum(lengths), device, Tokens())

    @classmethod
    def _of(
        cls,
        starts: list[int],
        parents: list[int],
        size: int,
        device: torch.device | str,
        tokens: Tokens,
        ahead: Ahead | None = None,
    ) -> "ForestLayout":
        segments = [range(start, end) for start, end in pairwise([*starts, size])]
        paths: list[list[range]] = []  # each segment's ancestors
        for parent in parents:
            paths.append([] if parent < 0 else [*paths[parent], segments[parent]])

        rows: list[tuple[list[range], range, int]] = []  # ancestors, tokens, index on this rank
        here = 0
        for run in tokens.runs(size):
            for segment, path in zip(segments, paths, strict=True):
                part = range(max(segment.start, run.start), min(segment.stop, run.stop))
                if part:
                    rows.append(([*path, range(segment.start, part.start)], part, here + part.start - run.start))
            here += len(run)
        before = [sum(map(len, path)) for path, _, _ in rows]
        lengths = [len(part) for _, part, _ in rows]
        later = [range(part.stop, part.stop if ahead is None else ahead.reach(part)) for _, part, _ in rows]

        blocks: list[Block] = []
        query: list[range] = []  # padding has indices after the last token
        key: list[range] = []
        for members in bins_of(before, lengths):
            queries = max(lengths[i] for i in members)
            keys = max(before[i] + lengths[i] + len(later[i]) for i in members)
            for i in members:
                path, part, at = rows[i]
                query += [range(at, at + len(part)), range(here, here + queries - len(part))]
                key += [*path, part, later[i], range(size, size + keys - before[i] - len(part) - len(later[i]))]
            ancestors = torch.tensor([before[i] for i in members])
            even, roots = bool((ancestors == ancestors[0]).all()), not ancestors.any()
            block = Block(len(members), queries, keys, placed(ancestors, torch.device(device)), even, roots)
            if ahead is not None:
                counts = [F.pad(ahead.count[rows[i][1].start : rows[i][1].stop], (0, queries)) for i in members]
                looks = torch.stack([count[:queries] for count in counts])
                block.ahead = replace(ahead, count=placed(looks, torch.device(device))) if looks.any() else None
            blocks.append(block)
        packed = _numbers(query)
        row_of_token = _order(packed)[:here]
        return cls(
            blocks,
            Gather.of(packed, here, device),
            Gather.of(_numbers(key), size, device),
            Gather.of(row_of_token, len(packed), device),
            tokens,
        )

    def mask(self, index: int, window: int | None, dtype: torch.dtype, always: bool = False) -> Tensor | None:
        """Return the mask that is added to block ``index``'s scores, [1 or C, 1, queries, keys]. None means a plain
        causal mask, unless ``always`` is set."""
        name = (index, window, dtype, always)
        if name not in self.masks:
            block = self.blocks[index]
            whole = window is None or window >= block.keys
            ahead = None if block.ahead is None else block.ahead.of_layer(window)
            if whole and block.roots and block.keys == block.queries and ahead is None and not always:
                self.masks[name] = None
            else:
                before = block.before[:1] if block.even else block.before
                here = before[:, None, None, None] + torch.arange(block.queries, device=before.device)[:, None]
                here = here.clamp(max=block.keys - 1)  # padding must see some key too, or it becomes nan
                there = torch.arange(block.keys, device=before.device)
                seen = there <= (here if ahead is None else here + ahead[:, None, :, None])
                if window is not None and not whole:
                    seen &= there > here - window
                self.masks[name] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return self.masks[name]


@dataclass(slots=True)
class Gather:
    """Selection of rows by index, with a backward pass that sums in float32 for any dtype of the rows (a shared
    prompt's keys are selected once per answer)."""

    index: Tensor  # [R] selected row; padding selects row 0
    back: Tensor  # the selections without padding, sorted by selected row
    bags: Tensor  # [rows] start of each row's selections in ``back``

    @classmethod
    def of(cls, index: Tensor, rows: int, device: torch.device | str) -> "Gather":
        """Return the gather of ``index`` [R] from ``rows`` rows; an index outside of them is padding."""
        there = index < rows
        back = _order(index)[: int(there.sum())]
        counts = torch.bincount(index[there], minlength=rows)
        return cls(*(placed(x, torch.device(device)) for x in (index.where(there, 0), back, counts.cumsum(0) - counts)))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the selected rows. [rows, width] -> [R, width]"""
        picked: Tensor = _Pick.apply(rows, self.index, self.back, self.bags)
        return picked


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor, bags: Tensor) -> Tensor:
        ctx.save_for_backward(back, bags)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, bags = ctx.saved_tensors
        return F.embedding_bag(back, grads[0].contiguous(), bags, mode="sum"), None, None, None


def _numbers(runs: list[range]) -> Tensor:
    return concat_aranges(torch.tensor([run.start for run in runs]), torch.tensor([len(run) for run in runs]))


def _order(index: Tensor) -> Tensor:
    """Return a stable ``argsort``; numpy's is several times as fast for inputs with long sorted runs."""
    return torch.from_numpy(index.numpy().argsort(kind="stable"))


def bins_of(before: list[int], lengths: list[int]) -> list[list[int]]:
    """Group rows into bins of similar size, to limit padding. Return the indices of each bin's rows."""
    bins: list[list[int]] = []
    longest, needed, size = 0, 0, (0, 0)
    for i in sorted(range(len(lengths)), key=lambda i: (before[i], lengths[i])):
        pairs = lengths[i] * (before[i] + lengths[i])
        padded = (max(size[0], lengths[i]), max(size[1], before[i] + lengths[i]))
        count = len(bins[-1]) + 1 if bins else 1
        fits = count * padded[0] * padded[1] <= _PADDING * (needed + pairs) + _SLACK
        if not bins or not fits or (before[i] == 0) != (longest == 0):
            bins.append([])
            needed, padded = 0, (lengths[i], before[i] + lengths[i])
        bins[-1].append(i)
        longest, needed, size = before[i], needed + pairs, padded
    return bins
