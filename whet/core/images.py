"""Placeholder tokens of images.

An image takes as many tokens of a prompt as its vision tower returns features. Their ids are negative and derive from
the image, so that prompts with different images have no common prefix: not in a batch, and not in a prefix cache.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt

from whet.base.errors import DataError


def placeholders(url: str, count: int) -> list[int]:
    """Return the ids of the ``count`` tokens of the image with this data URL: below -1, and four at least in turn, of
    30 bits each."""
    return list(islice(cycle(_ids(url)), count))


def images_of(
    pieces: Sequence[Sequence[int]], images: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], "npt.NDArray[np.int64]"]:
    """Return the data URLs of all images in the pieces of tokens, and for each token the index of its image, -1 for
    other tokens. ``images`` are the data URLs of the conversation that each piece belongs to. Raises ``DataError`` for
    a placeholder of an image that is not among them."""
    numbers: dict[str, int] = {}
    column = np.full(sum(map(len, pieces)), -1, dtype=np.int64)
    start = 0
    for piece, urls in zip(pieces, images, strict=True):
        ids = np.asarray(piece, dtype=np.int64)
        if ids.size and ids.min() < 0:
            of_id = {id: url for url in urls for id in _ids(url)}
            missing = next((id for id in ids[ids < 0].tolist() if id not in of_id), None)
            if missing is not None:
                raise DataError(f"token {missing} stands for an image that the messages of its conversation don't have")
            column[start : start + len(ids)][ids < 0] = [
                numbers.setdefault(of_id[id], len(numbers)) for id in ids[ids < 0].tolist()
            ]
        start += len(ids)
    return tuple(numbers), column


@lru_cache(maxsize=4096)
def _ids(url: str) -> tuple[int, ...]:
    words = np.frombuffer(hashlib.sha256(url.encode()).digest()[:16], dtype="<u4")
    return tuple((-2 - (words >> 2).astype(np.int64)).tolist())
