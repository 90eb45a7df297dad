"""Prompts whose keys and values are known, under one set of weights: a later prompt computes only what comes after the
longest beginning that it has in common with one of them. The next turn of an episode so extends the last one, and
prompts with the same system text or examples compute that once. Knows no requests and no model.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from whet.engines.torch.prefix import Prefix


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a prompt leaves."""

    prefix: Prefix
    logits: Tensor  # [V] after its last token


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with in common.

    >>> shared((5, 6, 7), (5, 6, 8, 9))
    2
    """
    least = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), least)


class PrefixStore:
    """Up to ``limit`` tokens of prompts once trimmed; the one that was used least lately goes first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: OrderedDict[tuple[int, ...], Known] = OrderedDict()  # by last use
        self._sorted: list[tuple[int, ...]] = []

    def clear(self) -> None:
        self._known.clear()
        self._sorted.clear()

    def get(self, prompt: tuple[int, ...]) -> Known | None:
        """Return what the very prompt leaves."""
        if prompt in self._known:
            self._known.move_to_end(prompt)
        return self._known.get(prompt)

    def longest(self, prompt: tuple[int, ...]) -> Prefix:
        """Return the longest beginning that is known of a prompt, short of its last token."""
        at = bisect_left(self._sorted, prompt)
        beside = self._sorted[max(0, at - 1) : at + 1]  # nothing shares more with it than its neighbours
        length, other = max(((shared(prompt, other), other) for other in beside), default=(0, prompt))
        length = min(length, len(prompt) - 1)
        return self._known[other].prefix.first(length) if length else Prefix(0)

    def add(self, prompt: tuple[int, ...], known: Known) -> Known:
        """Keep what a prompt leaves; the one that it extends is less worth keeping from now on."""
        at = bisect_left(self._sorted, prompt)
        before = self._sorted[at - 1] if at else ()
        if before and shared(before, prompt) == len(before):
            self._known.move_to_end(before, last=False)
        insort(self._sorted, prompt)
        self._known[prompt] = known
        return known

    def trim(self) -> None:
        held = sum(map(len, self._known))
        while held > self.limit:
            prompt, _ = self._known.popitem(last=False)
            held -= len(prompt)
            del self._sorted[bisect_left(self._sorted, prompt)]
