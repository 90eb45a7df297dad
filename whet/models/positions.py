"""Positions of three numbers, of time, height and width (M-RoPE, arXiv 2409.12191, section 2.1).

The three are equal for a token of text. The tokens of an image have one time and their places in its grid, and the text
after an image continues after the larger side of the grid, not after the number of its tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

Grid = tuple[int, int]
"""The rows and columns of an image's features."""


def grid_positions(
    place: Tensor, start: Sequence[int], parent: Sequence[int], image: Tensor, row: Tensor, grids: Sequence[Grid]
) -> Tensor:
    """Return the positions of tokens in a forest of segments, [3, N].

    ``place``, [N]: the number of tokens before each one in its segment and the ancestors. ``start``,
    ``parent``: the first token and the parent of each segment, -1 for a root; parents come before children.
    ``image``, [N]: the index of each token's image in ``grids``, -1 for text. ``row``, [N]: the number of each token
    among the features of its image.
    """
    jump = torch.zeros_like(place)  # what an image changes for the tokens after it, at its last token
    offset = torch.zeros(3, len(place), dtype=place.dtype)  # from the first token of an image
    for index, (height, width) in enumerate(grids):
        inside = image == index
        jump[inside & (row == height * width - 1)] = max(height, width) - height * width
        offset[1, inside] = row[inside] // width
        offset[2, inside] = row[inside] % width
    total = torch.cat([jump.new_zeros(1), jump.cumsum(0)])
    entering: list[int] = []  # the sum of the jumps in a segment's ancestors
    ends = [*start[1:], len(place)]
    for above in parent:
        inherited = 0 if above < 0 else entering[above] + int(total[ends[above]] - total[start[above]])
        entering.append(inherited)
    first, length = torch.tensor(start), torch.tensor(ends) - torch.tensor(start)
    before = total[:-1] + (torch.tensor(entering) - total[first]).repeat_interleave(length)
    return place + before - torch.where(image < 0, 0, row) + offset
