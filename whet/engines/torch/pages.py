"""The prompts of the rows in flight, in pages: a page that several prompts share is held, and read, once.

A *tile* is a page and up to ``places`` rows whose prompts contain it. Rows of one prompt share its pages, and rows of
different prompts share the pages of a common beginning that was computed once. Pages begin at multiples of ``PAGE``
tokens, whether they are shared or not, so that a row's result doesn't depend on other rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from whet.engines.torch.prefix import Prefix
from whet.engines.torch.tiles import Lanes, Turn, resized

PAGE = 128  # tokens
Source = tuple[tuple[int, int, int], ...]  # where the keys of a page lie in memory: storages, offsets and tokens


class Tiles:
    """Tiles with the same number of places. keys per layer [tiles, kv_heads, PAGE, D]."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.tiles: list[Tile] = []
        self.turns: list[Turn] = []  # of the current forward pass

    def reserve(self, number: int, like: Prefix) -> None:
        """Make room for more tiles."""
        size, needed = len(self.keys[0]) if self.keys else 0, len(self.tiles) + number
        if needed > size:
            size = max(needed, size * 5 // 4)  # little more than is used: a tile takes megabytes
            self.keys = resized(self.keys, like.keys, (size,), PAGE)
            self.values = resized(self.values, like.values, (size,), PAGE)

    def add(self, source: Source, page: int, prefix: Prefix) -> "Tile":
        self.reserve(1, prefix)
        tile = Tile(self.places, len(self.tiles), source, page, [])
        for packed, pieces in zip(self.keys + self.values, prefix.keys + prefix.values, strict=True):
            end = 0
            for piece, part in _parts(pieces, page):
                start, end = end, end + part.stop - part.start
                packed[tile.number, :, start:end] = piece[:, part]
            packed[tile.number, :, end:] = 0
        self.tiles.append(tile)
        return tile

    def drop(self, tile: "Tile") -> None:
        """Remove a tile. The last one takes its number."""
        last = self.tiles.pop()
        if last is not tile:
            for packed in self.keys + self.values:
                packed[tile.number] = packed[last.number]
            self.tiles[tile.number], last.number = last, tile.number


@dataclass(slots=True, eq=False)
class Tile:
    places: int
    number: int  # in its ``Tiles``
    source: Source
    page: int
    rows: list[int]


class Pages:
    """The tiles of all rows."""

    def __init__(self) -> None:
        self.kinds: dict[int, Tiles] = {}  # by places; their number changes the speed, not the result
        self.rows: list[list[Tile]] = []  # the tiles of each row, page by page
        self._tiles: dict[Source, list[Tile]] = {}
        self._indexed: tuple[int, ...] = ()  # the lanes of each row for which the turns were computed

    def join(self, prefixes: Sequence[Prefix]) -> None:
        """Add rows at the end, in this order."""
        self._indexed = ()
        sources = [[_source(prefix, page) for page in range(-(-prefix.length // PAGE))] for prefix in prefixes]
        sharing = Counter(chain.from_iterable(sources))
        for source in sharing:
            sharing[source] += sum(len(tile.rows) for tile in self._tiles.get(source, []))
        new = Counter(_places(number) for source, number in sharing.items() if source not in self._tiles)
        for places, number in new.items():
            self.kinds.setdefault(places, Tiles(places)).reserve(number, prefixes[0])
        for prefix, pages in zip(prefixes, sources, strict=True):
            tiles = [self._tile(source, page, prefix, _places(sharing[source])) for page, source in enumerate(pages)]
            for tile in tiles:
                tile.rows.append(len(self.rows))
            self.rows.append(tiles)

    def _tile(self, source: Source, page: int, prefix: Prefix, places: int) -> Tile:
        """Return a tile of this page with a free place."""
        tiles = self._tiles.setdefault(source, [])
        for tile in tiles:
            if len(tile.rows) < tile.places:
                return tile
        tiles.append(self.kinds.setdefault(places, Tiles(places)).add(source, page, prefix))
        return tiles[-1]

    def leave(self, row: int) -> None:
        """Remove a row. The last one takes its number."""
        self._indexed = ()
        for tile in self.rows[row]:
            tile.rows.remove(row)
            if not tile.rows:
                self.kinds[tile.places].drop(tile)
                self._tiles[tile.source].remove(tile)
                if not self._tiles[tile.source]:
                    del self._tiles[tile.source]
        self.kinds = {places: tiles for places, tiles in self.kinds.items() if tiles.tiles}
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last
            for tile in last:
                tile.rows[tile.rows.index(len(self.rows))] = row

    def index(self, lanes: Lanes) -> bool:
        """Compute the turns of a forward pass; unchanged rows keep theirs. Return whether they changed."""
        if self._indexed == (counts := tuple(lanes.counts)):
            return False
        self._indexed = counts
        for tiles in self.kinds.values():
            members = [
                (row, tile.page, tile.number * tiles.places + place)
                for tile in tiles.tiles
                for place, row in enumerate(tile.rows)
            ]
            tiles.turns = lanes.turns(members, len(tiles.tiles), tiles.places)
        return True


def _places(rows: int) -> int:
    return 16 if rows > 12 else 8 if rows > 6 else 4


def _parts(pieces: Sequence[Tensor], page: int) -> list[tuple[Tensor, slice]]:
    """Return the pieces that a page consists of, each with its tokens."""
    parts = []
    start = page * PAGE
    for piece in pieces:
        length = piece.shape[1]
        if start < length and start > -PAGE:
            parts.append((piece, slice(max(start, 0), min(start + PAGE, length))))
        start -= length
    return parts


def _source(prefix: Prefix, page: int) -> Source:
    """Return what identifies a page for as long as a row with it is in flight."""
    return tuple(
        (piece.untyped_storage()._cdata, piece.storage_offset() + part.start * piece.stride(1), part.stop - part.start)
        for piece, part in _parts(prefix.keys[0], page)
    )
