"""The tiles of keys and values that rows in flight attend to, and the turns of the products with them.

A *tile* is a page of a prompt and up to ``places`` rows that share it (see ``pages``), or ``BLOCK`` tokens of the
completion of a row, with one place. The queries of a forward pass are its *lanes*. Usually a row has one lane. A row
with guessed tokens has one for its newest token and one for each guess. Products are then computed in turns, in each of
which a row has at most one lane: every product has the shape that it has without guesses, and so the same result, to
the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

BLOCK = 64
ROWS = 16  # the number of rows of a forward pass is a multiple of this


def padded(rows: int) -> int:
    """Return the number of rows of a forward pass."""
    return -(-rows // ROWS) * ROWS


def resized(old: list[Tensor], like: list[tuple[Tensor, ...]], sizes: tuple[int, ...], tokens: int) -> list[Tensor]:
    """Return the tensor of each layer, [*sizes, kv_heads, tokens, D], with the part of the old one that fits, and
    zeros. Each replaces the old one in its list at once, so that memory is freed early."""
    new = []
    for layer, (x, *_) in enumerate(like):
        target = x.new_zeros(*sizes, x.shape[0], tokens, x.shape[2])
        if old:
            kept = tuple(slice(min(pair)) for pair in zip(sizes, old[layer].shape, strict=False))
            target[kept] = old[layer][kept]
            old[layer] = target
        new.append(target)
    return new


@dataclass(frozen=True, slots=True)
class Turn:
    """The lanes that take part in one product with tiles."""

    lane_at: Tensor  # [tiles, places] the lane at each place; any lane where there is none
    page_at: Tensor  # [tiles, places] and the number of the page in its prompt
    lanes: Tensor  # [members] the lanes that take part
    pages: Tensor  # [members] their pages
    places: Tensor  # [members] and their places, counted through all tiles


class Lanes:
    """The lanes of a forward pass: ``counts[row]`` consecutive ones for each row, of which the first is its newest
    token."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts, self.device = counts, device
        self.starts = [0, *accumulate(counts)]
        self.row = [row for row, count in enumerate(counts) for _ in range(count)]  # of each lane

    def __len__(self) -> int:
        return len(self.row)

    def turns(self, members: Sequence[tuple[int, int, int]], tiles: int, places: int) -> list[Turn]:
        """Return the turns of these numbers of tiles and places of each; ``members`` are (row, page, place)."""
        turns = []
        for i in range(max(self.counts)):
            taking = [(self.starts[row] + i, page, place) for row, page, place in members if self.counts[row] > i]
            if taking:
                lanes, pages, at = torch.tensor(taking, device=self.device).unbind(1)
                lane_at, page_at = (torch.zeros(tiles * places, dtype=torch.long, device=self.device) for _ in range(2))
                lane_at[at], page_at[at] = lanes, pages
                turns.append(Turn(lane_at.view(tiles, places), page_at.view(tiles, places), lanes, pages, at))
        return turns
