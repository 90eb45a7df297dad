"""The layout of the keys and values that rows in flight attend to, and the products with them.

A *tile* is one prompt and up to ``places`` rows that continue it; the completion of a row is a tile with one place. The
queries of a forward pass are its *lanes*. Usually a row has one lane. A row with guessed tokens has one for its newest
token and one for each guess. Products are then computed in turns, in each of which a row has at most one lane: every
product has the shape that it has without guesses, and so the same result, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from whet.engines.torch.prefix import Prefix

BLOCK = 64
ROWS = 16  # the number of rows of a forward pass is a multiple of this


def padded(rows: int) -> int:
    """Return the number of rows of a forward pass."""
    return -(-rows // ROWS) * ROWS


def size_class(length: int) -> int:
    """Return the padded length of a prompt of ``length`` tokens: a function of the length alone, at most 1.5 times as
    large.

    >>> [size_class(n) for n in (1, 65, 129, 193, 300, 400)]
    [64, 128, 192, 256, 384, 512]
    """
    step = max(BLOCK, 1 << max((length - 1).bit_length() - 2, 0))
    return -(-length // step) * step


def resized(old: list[Tensor], like: list[tuple[Tensor, ...]], rows: int, tokens: int) -> list[Tensor]:
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


@dataclass(frozen=True, slots=True)
class Turn:
    """The lanes that take part in one product with tiles."""

    at_place: Tensor  # [tiles * places] the lane at each place; any lane where there is none
    lanes: Tensor  # [members] the lanes that take part
    places: Tensor  # [members] and their places
    aligned: bool = False  # every place is taken, by the lane with its number


def product(x: Tensor, tiles: Tensor, places: int, turn: Turn) -> Tensor:
    """Multiply x [lanes, kv_heads, G, A] with tiles [tiles, kv_heads, A, B] -> [members, kv_heads, G, B]."""
    (count, kv_heads), (_, _, group, width) = tiles.shape[:2], x.shape
    x = x if turn.aligned else x.index_select(0, turn.at_place)
    x = x.view(count, places, kv_heads, group, width).transpose(1, 2)
    y = torch.bmm(x.reshape(count * kv_heads, places * group, width), tiles.flatten(0, 1))
    y = y.view(count, kv_heads, places, group, -1).transpose(1, 2).flatten(0, 1)
    return y if turn.aligned else y.index_select(0, turn.places)


class Lanes:
    """The lanes of a forward pass: ``counts[row]`` consecutive ones for each row, of which the first is its newest
    token."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts, self.device = counts, device
        self.starts = [0, *accumulate(counts)]
        self.row = [row for row, count in enumerate(counts) for _ in range(count)]  # of each lane

    def __len__(self) -> int:
        return len(self.row)

    def turns(self, rows: Sequence[int], members: Sequence[tuple[int, int]]) -> list[Turn]:
        """Return the turns of tiles with these ``rows`` at their places; ``members`` are (row, place)."""
        turns = []
        for i in range(max(self.counts)):
            taking = [(self.starts[row] + i, place) for row, place in members if self.counts[row] > i]
            if taking:
                at_place = [self.starts[row] + i if self.counts[row] > i else 0 for row in rows]
                aligned = taking == [(lane, lane) for lane in range(len(self))] and len(rows) == len(self)
                lanes, places = zip(*taking, strict=True)
                indices = [torch.tensor(index, device=self.device) for index in (at_place, lanes, places)]
                turns.append(Turn(indices[0], indices[1], indices[2], aligned))
        return turns


class Tiles:
    """Prompts of one size class.

    keys per layer [tiles, kv_heads, length, D]. A group with more rows than places has several tiles; the number of
    places changes the speed, not the result.
    """

    def __init__(self, length: int, places: int) -> None:
        self.length, self.places = length, places
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.prefixes: list[Prefix] = []  # [tiles]
        self.rows: list[list[int]] = []  # [tiles][at most places]
        self.turns: list[Turn] = []  # of the current forward pass
        self._indexed: tuple[int, ...] = ()  # the lanes of each row for which ``turns`` were computed

    def add(self, row: int, prefix: Prefix) -> None:
        self._indexed = ()
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
        self.keys = resized(self.keys, prefix.keys, tiles, self.length)
        self.values = resized(self.values, prefix.values, tiles, self.length)

    def remove(self, row: int) -> None:
        self._indexed = ()
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
        self._indexed = ()
        for rows in self.rows:
            if old in rows:
                rows[rows.index(old)] = new

    def index(self, lanes: Lanes) -> None:
        """Compute the turns of a forward pass; unchanged rows keep theirs."""
        if self._indexed == (counts := tuple(lanes.counts)):
            return
        self._indexed = counts
        rows = [row for rows in self.rows for row in rows + [0] * (self.places - len(rows))]
        members = sorted((row, t * self.places + i) for t, rows in enumerate(self.rows) for i, row in enumerate(rows))
        self.turns = lanes.turns(rows, members)
