"""The products of a decode step, for layers with the same heads.

Their operands and results are moved as whole rows of numbers, by ``index_select``, whose indices are the same in all
layers. The rows of a tile are in the order (place, query head of the kv head), and in one product or in several ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.engines.torch.row_counts import Split
from whet.engines.torch.tiles import BLOCK, Turn


@dataclass(frozen=True, slots=True)
class Part:
    """The products of one turn's queries with some tiles: where their rows come from."""

    products: int  # with each tile
    queries: Tensor  # [rows] among queries [lanes * heads]
    shares: Tensor  # [rows * blocks of a tile] among the probabilities' blocks
    rows: slice  # among the rows of all parts
    blocks: slice  # the same, in blocks of scores


class Products:
    """The parts of a step and their results. ``parts``: each turn with the tokens of its tiles, and the column of the
    scores at which their page 0 begins: 0 for prompts. ``split``: the products for a number of rows with a tile of a
    prompt. A tile of a completion always has the same rows, so they need no other number."""

    def __init__(
        self,
        parts: Sequence[tuple[Turn, int, int]],
        lanes: int,
        kv_heads: int,
        group: int,
        columns: int,
        split: Callable[[int], Split],
    ) -> None:
        device, blocks = parts[0][0].lanes.device, columns // BLOCK
        heads = torch.arange(kv_heads * group, device=device).view(1, kv_heads, 1, group)
        self.parts: list[Part] = []
        members: list[Tensor] = []  # for each part, the rows of each member, [members, kv_heads, group]
        rows = rows_in_blocks = 0
        for turn, tokens, start in parts:
            wide, (tiles, places) = tokens // BLOCK, turn.lane_at.shape
            queries = (turn.lane_at[:, None, :, None] * heads.numel() + heads).view(tiles * kv_heads, -1)
            page_at = turn.page_at[:, None, :, None].expand(tiles, kv_heads, places, group).reshape(queries.shape)
            of_tile = split(places * group) if places > 1 else Split(1, group)
            first = of_tile.arrange(queries * blocks + start // BLOCK + page_at * wide)
            queries = of_tile.arrange(queries)
            shares = first[:, None] + torch.arange(wide, device=device)
            end, last = rows + queries.numel(), rows_in_blocks + shares.numel()
            self.parts.append(
                Part(of_tile.products, queries, shares.flatten(), slice(rows, end), slice(rows_in_blocks, last))
            )
            of_place = of_tile.places(tiles * kv_heads, places * group, device).view(tiles, kv_heads, places, group)
            members.append(of_place.transpose(1, 2).reshape(-1, kv_heads, group)[turn.places])
            rows, rows_in_blocks = end, last

        scores = torch.full((lanes, blocks, kv_heads, group), rows_in_blocks, device=device)
        pages = {start: 1 + max(int(turn.pages.max()) for turn, _, at in parts if at == start) for _, _, start in parts}
        before = {start: pages.get(0, 0) if start else 0 for start in pages}
        results = torch.full((sum(pages.values()), lanes, kv_heads, group), rows, device=device)
        for (turn, tokens, start), part, mine in zip(parts, self.parts, members, strict=True):
            inside = torch.arange(wide := tokens // BLOCK, device=device)
            at = start // BLOCK + turn.pages[:, None] * wide + inside
            scores[turn.lanes[:, None], at] = part.blocks.start + mine[:, None] * wide + inside[:, None, None]
            results[before[start] + turn.pages, turn.lanes] = part.rows.start + mine
        self._scores = scores.permute(0, 2, 3, 1).flatten()
        self._results = results.flatten(1)
        self._kept: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def scores(self, queries: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Multiply queries [lanes * heads, D] with the keys [tiles, kv_heads, tokens, D] of each part. Return the
        scores, [lanes * heads, columns], 0 where there is no key."""
        products = self._room("scores' products", queries, self.parts[-1].blocks.stop + 1, BLOCK)
        products[-1] = 0
        for part, tiles in zip(self.parts, keys, strict=True):
            self._multiply(queries, part.queries, part.products, tiles.mT, products[part.blocks])
        scores = self._room("scores", queries, len(self._scores), BLOCK)
        return torch.index_select(products, 0, self._scores, out=scores).view(len(queries), -1)

    def results(self, shares: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Multiply probabilities [lanes * heads, columns] with the values [tiles, kv_heads, tokens, Dv] of each part.
        Return the sums over all tiles of a lane, [lanes * heads, Dv], page by page."""
        products = self._room("products", shares, self.parts[-1].rows.stop + 1, values[0].shape[-1])
        products[-1] = 0
        blocks = shares.reshape(-1, BLOCK)
        for part, tiles in zip(self.parts, values, strict=True):
            self._multiply(blocks, part.shares, part.products, tiles, products[part.rows])
        out, *others = (products.index_select(0, rows) for rows in self._results)
        for other in others:
            out += other
        return out

    def _multiply(self, x: Tensor, rows: Tensor, products: int, tiles: Tensor, out: Tensor) -> None:
        """Multiply these rows of x with tiles [tiles, kv_heads, A, B], into ``out``."""
        matrices = tiles.flatten(0, 1)
        left = torch.index_select(x, 0, rows, out=self._room("left", x, len(rows), x.shape[1]))
        left = left.view(products, len(matrices), -1, matrices.shape[1])
        for operand, result in zip(left, out.view(*left.shape[:3], -1), strict=True):
            torch.bmm(operand, matrices, out=result)

    def _room(self, name: str, like: Tensor, rows: int, width: int) -> Tensor:
        """Return memory for [rows, width] numbers, the same in each layer: memory from the system costs more than what
        is written into it."""
        kept = self._kept.get(key := (name, width, like.dtype))
        if kept is None or len(kept) < rows:
            kept = self._kept[key] = like.new_empty(rows, width)
        return kept[:rows]
