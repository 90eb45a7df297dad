"""The numbers of rows of a product with a tile whose results don't depend, to the bit, on how many rows there are.

Kernels for CPUs compute some rows together and treat the remainder differently: with AVX-512 any multiple of four
agrees, but Intel's library computes six rows at once without it, and switches to another kernel where there are many
rows. So the numbers are tried on this machine, for the shapes of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_REFERENCES = (16, 12, 24, 8, 4)  # numbers of rows, the first that treats all rows alike counts
_MORE = 12  # rows that a product may have in addition


@dataclass(frozen=True, slots=True)
class Split:
    """The products in which the rows of a tile are computed, each with the same number of rows."""

    products: int
    rows: int

    def arrange(self, x: Tensor) -> Tensor:
        """Return the elements for each row [tiles, n] in the order of products, tiles and rows, flat. Missing rows get
        the first element of their tile."""
        filled = x[:, :1].repeat(1, self.products * self.rows)
        filled[:, : x.shape[1]] = x
        return filled.view(len(x), self.products, self.rows).transpose(0, 1).flatten()

    def places(self, tiles: int, n: int, device: torch.device) -> Tensor:
        """Return where the elements of ``arrange`` are. [tiles, n]"""
        row, tile = torch.arange(n, device=device), torch.arange(tiles, device=device)
        return ((row // self.rows) * tiles + tile[:, None]) * self.rows + row % self.rows


def split_of(rows: int, tokens: int, like: Tensor, value_width: int) -> Split:
    """Return how the products of ``rows`` rows of queries ``like`` [..., D] with tiles of keys [tokens, D] and values
    [tokens, ``value_width``] are computed."""
    if like.device.type != "cpu":
        return Split(1, rows)
    shapes = ((like.shape[-1], tokens, True), (tokens, value_width, False))
    return _chosen(rows, shapes, like.dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _chosen(rows: int, shapes: tuple[tuple[int, int, bool], ...], dtype: torch.dtype, *_: object) -> Split:
    agree = [_agreement(*shape, dtype) for shape in shapes]
    for products in range(1, rows // 4 + 1):
        least = -(-rows // products)
        for size in range(least, least + _MORE + 1):
            if all(agrees(size) for agrees in agree):
                return Split(products, size)
    return Split(1, rows)


@torch.no_grad()
def _agreement(inputs: int, outputs: int, transposed: bool, dtype: torch.dtype) -> Callable[[int], bool]:
    """Return a function that says whether products [rows, inputs] x [inputs, outputs] with a number of rows treat each
    row like the reference. Their sums cancel, so that they consist of rounding errors, which show any other order if
    terms and their opposites are mixed."""
    random, matrices, half = torch.Generator().manual_seed(0), 8, -(-inputs // 2)
    mixed = torch.randperm(2 * half, generator=random)[:inputs]
    terms = torch.randn(matrices, 1, half, generator=random)
    row = torch.cat([terms, -terms], 2)[..., mixed].to(dtype)
    factors = torch.randn(matrices, outputs, half, generator=random)
    tile = torch.cat([factors, factors], 2)[..., mixed].to(dtype)
    right = tile.contiguous().mT if transposed else tile.mT.contiguous()

    @torch.no_grad()
    def results(rows: int) -> Tensor:
        return torch.bmm(row.repeat(1, rows, 1), right)

    def alike(result: Tensor, expected: Tensor) -> bool:
        return torch.equal(result, expected.expand_as(result))

    reference = next((rows for rows in _REFERENCES if alike(made := results(rows), made[:, :1])), None)
    if reference is None:
        return lambda rows: True  # no number of rows is better than another
    expected = results(reference)[:, :1]
    return lambda rows: alike(results(rows), expected)
