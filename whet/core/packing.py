"""Packs a batch into micro-batches of bounded size, as [data-parallel rank][micro-batch]. Every rank gets the same
number of micro-batches. Token weights are set before, so packing does not change the gradient."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from typing import overload

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


class Shard(Sequence[MicroBatch]):
    """The micro-batches of one data-parallel rank. Each is cut out of the batch when it is read, so that the
    controller of many ranks never holds the copies of all. A pickled shard is a list of micro-batches."""

    def __init__(self, batch: Batch, sequences: Sequence[Sequence[int]], idle: Sequence[int] = ()) -> None:
        """``sequences``: of each micro-batch. Where there are none, it has the sequences ``idle`` with an empty loss
        mask: a rank without work still takes part in collectives."""
        self._batch, self._sequences, self._idle = replace(batch), sequences, idle  # columns filled later are not sent

    def __len__(self) -> int:
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        sequences = self._sequences[index]
        part, tokens = self._batch.select(torch.tensor(sorted(sequences or self._idle)))
        return MicroBatch(part if sequences else idle(part), tokens[part.segment_start])

    def __reduce__(self) -> tuple[type[list[MicroBatch]], tuple[tuple[MicroBatch, ...]]]:
        return list, (tuple(self),)

    def bare(self) -> "Shard":
        """Return the same micro-batches with the tokens and their loss mask only."""
        return Shard(self._batch.bare(), self._sequences, self._idle)


def pack(
    batch: Batch,
    ranks: int,
    max_tokens: int,
    unit: str = "token",
    pack_tokens: int | None = None,
    sequences: Tensor | None = None,
) -> list[Shard]:
    """Cut ``sequences`` of ``batch`` ([s] int64, ascending; by default all) into micro-batches of at most
    ``max_tokens`` tokens, for each of ``ranks`` ranks.

    Groups stay together if they fit, so that their prompt is computed once; with ``unit="group"`` (losses that compare
    the members of a group) they are never split. Smaller pieces are packed up to ``pack_tokens``, by default
    ``max_tokens``. Deterministic. Raises ``DataError`` if a piece is too large.
    """
    room = min(pack_tokens or max_tokens, max_tokens)
    chosen = range(batch.sequences) if sequences is None else sequences.tolist()
    pieces = _pieces(batch, chosen, room, max_tokens, whole_groups=unit == "group")
    if not pieces:
        return [Shard(batch, []) for _ in range(ranks)]
    length = batch.segment_length.tolist()
    pieces.sort(key=lambda piece: (-piece.size, piece.sequences))
    room = max(room, pieces[0].size)
    count = -(-sum(length[segment] for segment in set().union(*(piece.segments for piece in pieces))) // room)
    while True:  # add micro-batches until the pieces fit
        count = -(-count // ranks) * ranks
        bins = _spread(pieces, count, room, length)
        if bins is not None:
            break
        count += 1 + count // 50
    shortest = _shortest(batch, chosen, whole_groups=unit == "group")
    return [Shard(batch, bins[rank::ranks], shortest) for rank in range(ranks)]


@dataclass(slots=True)
class _Piece:
    """Sequences that stay together."""

    sequences: list[int] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)  # of the sequences, with the ancestors that other pieces share
    size: int = 0  # in tokens

    def size_with(self, segments: set[int], length: Sequence[int]) -> int:
        """Return the size if ``segments`` are added."""
        return self.size + sum(length[segment] for segment in segments - self.segments)

    def add(self, sequences: Iterable[int], segments: set[int], size: int) -> None:
        self.sequences.extend(sequences)
        self.segments |= segments
        self.size = size


def _pieces(batch: Batch, chosen: Iterable[int], room: int, max_tokens: int, whole_groups: bool) -> list[_Piece]:
    """Return the pieces: a group, or as many of its sequences as fit into ``room``, or a single sequence that is
    longer."""
    length, parent = batch.segment_length.tolist(), batch.segment_parent.tolist()
    leaf = dict(zip(batch.segment_sequence.tolist(), range(len(parent)), strict=True))
    groups, members = batch.group.tolist(), dict[int, list[int]]()
    for sequence in chosen:
        members.setdefault(groups[sequence], []).append(sequence)
    pieces: list[_Piece] = []
    for group, sequences in members.items():
        piece = _Piece()
        for sequence in sequences:
            path, at = set[int](), leaf.get(sequence, -1)
            while at >= 0:
                path.add(at)
                at = parent[at]
            size = piece.size_with(path, length)
            if piece.sequences and not whole_groups and size > room:
                pieces.append(piece)
                piece = _Piece()
                size = piece.size_with(path, length)
            piece.add([sequence], path, size)
            if size > max_tokens:
                what = "a whole group" if whole_groups else "one sequence with its prompt"
                raise DataError(
                    f"group {batch.group_uids[group]!r}: {what} has {size} tokens, more than learner.max_tokens = "
                    f"{max_tokens}; raise learner.max_tokens or shorten prompts and answers"
                )
        pieces.append(piece)
    return [piece for piece in pieces if piece.size]  # a piece of empty answers has nothing to compute


def _spread(pieces: list[_Piece], count: int, max_tokens: int, length: Sequence[int]) -> list[list[int]] | None:
    """Put pieces, the longest first, each into the emptiest bin, which holds a shared segment once. Return None if a
    bin overflows."""
    bins = [_Piece() for _ in range(count)]
    loads = [(0, index) for index in range(count)]  # a heap
    for piece in pieces:
        index = loads[0][1]
        size = bins[index].size_with(piece.segments, length)
        if size > max_tokens:
            return None
        heapreplace(loads, (size, index))
        bins[index].add(piece.sequences, piece.segments, size)
    return [bin.sequences for bin in bins]


def _shortest(batch: Batch, chosen: Sequence[int], whole_groups: bool) -> list[int]:
    """Return the chosen sequence with the fewest tokens, of the ones that have tokens which are not shared; with
    ``whole_groups``, all chosen sequences of its group."""
    length = dict(zip(batch.segment_sequence.tolist(), batch.segment_length.tolist(), strict=True))
    shortest = min((sequence for sequence in chosen if sequence in length), key=length.__getitem__)
    group = batch.group.tolist()
    return [each for each in chosen if group[each] == group[shortest]] if whole_groups else [shortest]


def idle_micro_batches(batch: Batch, ranks: int, unit: str = "token") -> list[Shard]:
    """Return one micro-batch with an empty loss mask for each of ``ranks`` ranks."""
    shortest = _shortest(batch, range(batch.sequences), whole_groups=unit == "group")
    return [Shard(batch, [[]], shortest) for _ in range(ranks)]


def idle(batch: Batch) -> Batch:
    """Return the same tokens with an empty loss mask."""
    return replace(batch, trained=torch.zeros_like(batch.trained))
