"""Packs a batch into micro-batches of bounded size, as [data-parallel rank][micro-batch]. Every rank gets the same
number of micro-batches. Token weights are set before, so packing does not change the gradient."""

from dataclasses import dataclass, replace
from heapq import heapreplace

import torch
from torch import Tensor

from whet.base.errors import DataError
from whet.core.batch import Batch
from whet.core.forest import concat_aranges


@dataclass(slots=True)
class MicroBatch:
    """A part of a batch, and where its segments are in the whole batch."""

    batch: Batch
    begins: Tensor  # [segments] int64, the index in the whole batch of each segment's first token

    @property
    def tokens(self) -> Tensor:
        """The indices of its tokens in the whole batch, [n] int64. They are not kept: they would take as much memory,
        and as much of a message, as the tokens themselves."""
        return concat_aranges(self.begins, self.batch.segment_length)

    def within(self, whole: Tensor, part: Batch) -> "MicroBatch":
        """Return this part of ``part`` as a part of a whole batch, in which the segments of ``part`` begin at
        ``whole``, [segments of part]."""
        return MicroBatch(self.batch, whole[torch.searchsorted(part.segment_start, self.begins)])


def pack(
    batch: Batch, ranks: int, max_tokens: int, unit: str = "token", pack_tokens: int | None = None
) -> list[list[MicroBatch]]:
    """Cut ``batch`` into micro-batches of at most ``max_tokens`` tokens, for each of ``ranks`` ranks.

    Groups stay together if they fit, so that their prompt is computed once; with ``unit="group"`` (losses that compare
    the members of a group) they are never split. Smaller pieces are packed up to ``pack_tokens``, by default
    ``max_tokens``. Deterministic. Raises ``DataError`` if a piece is too large.
    """
    room = min(pack_tokens or max_tokens, max_tokens)
    pieces = _pieces(batch, room, max_tokens, whole_groups=unit == "group")
    if not pieces:
        return [[] for _ in range(ranks)]
    room = max(room, *(size for size, _ in pieces))
    count = -(-sum(size for size, _ in pieces) // room)
    while True:  # add micro-batches until the pieces fit
        count = -(-count // ranks) * ranks
        bins = _spread(pieces, count, room)
        if bins is not None:
            break
        count += 1
    micro = [_micro_batch(batch, sequences) for sequences in bins]
    return [micro[rank::ranks] for rank in range(ranks)]


def _pieces(batch: Batch, room: int, max_tokens: int, whole_groups: bool) -> list[tuple[int, list[int]]]:
    """Return (tokens, sequences) of each piece that stays together: a group, or as many of its sequences as fit into
    ``room``, or a single sequence that is longer."""
    length, parent = batch.segment_length.tolist(), batch.segment_parent.tolist()
    leaf = dict(zip(batch.segment_sequence.tolist(), range(len(parent)), strict=True))
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group.tolist()):
        members.setdefault(group, []).append(sequence)
    pieces: list[tuple[int, list[int]]] = []
    for group, sequences in members.items():
        segments, current = set[int](), list[int]()  # of the current piece; ``current`` lists its sequences
        size = 0
        for sequence in sequences:
            path, at = set[int](), leaf.get(sequence, -1)
            while at >= 0:
                path.add(at)
                at = parent[at]
            size = sum(length[segment] for segment in segments | path)
            if current and not whole_groups and size > room:
                pieces.append((sum(length[segment] for segment in segments), current))
                segments, current = set(), []
                size = sum(length[segment] for segment in path)
            segments |= path
            current.append(sequence)
            if size > max_tokens:
                what = "a whole group" if whole_groups else "one sequence with its prompt"
                raise DataError(
                    f"group {batch.group_uids[group]!r}: {what} has {size} tokens, more than learner.max_tokens = "
                    f"{max_tokens}; raise learner.max_tokens or shorten prompts and answers"
                )
        pieces.append((size, current))
    return [piece for piece in pieces if piece[0]]  # a piece of empty answers has nothing to compute


def _spread(pieces: list[tuple[int, list[int]]], count: int, max_tokens: int) -> list[list[int]] | None:
    """Put pieces into bins, longest first, each into the emptiest bin; return None if a bin overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]  # a heap
    for size, sequences in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        load, index = loads[0]
        if load + size > max_tokens:
            return None
        heapreplace(loads, (load + size, index))
        bins[index] += sequences
    return bins


def _micro_batch(batch: Batch, sequences: list[int]) -> MicroBatch:
    if sequences:
        part, tokens = batch.select(torch.tensor(sorted(sequences)))
        return MicroBatch(part, tokens[part.segment_start])
    # A rank without work still takes part in collectives: it gets one short sequence with an empty loss mask.
    unshared = batch.segment_sequence >= 0
    tokens_of = torch.bincount(
        batch.segment_sequence[unshared], batch.segment_length[unshared], minlength=batch.sequences
    )
    shortest = int(torch.where(tokens_of > 0, tokens_of, len(batch) + 1).argmin())
    part, tokens = batch.select(torch.tensor([shortest]))
    return MicroBatch(idle(part), tokens[part.segment_start])


def idle_micro_batches(batch: Batch, ranks: int) -> list[list[MicroBatch]]:
    """Return one micro-batch with an empty loss mask for each of ``ranks`` ranks."""
    return [[_micro_batch(batch, [])] for _ in range(ranks)]


def idle(batch: Batch) -> Batch:
    """Return the same tokens with an empty loss mask."""
    weight = None if batch.weight is None else torch.zeros_like(batch.weight)
    return replace(batch, trained=torch.zeros_like(batch.trained), weight=weight)
