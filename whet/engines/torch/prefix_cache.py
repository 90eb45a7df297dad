"""The prefix cache: the KV caches of prompts, for one set of weights. A later prompt computes only the tokens after the
longest prefix that it shares with a cached one. So the next turn of an episode extends the last one, and prompts with
the same system message or examples compute these once."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from whet.engines.torch.config import usual_prefix_tokens
from whet.engines.torch.prefix import Prefix


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A cached prompt."""

    prefix: Prefix
    logits: Tensor  # [V] after its last token


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two prompts.

    >>> common_prefix((5, 6, 7), (5, 6, 8, 9))
    2
    """
    least = min(len(first), len(second))
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), least)


class PrefixCache:
    """Up to ``limit`` tokens of prompts after a trim (None: see ``usual_prefix_tokens``); the least recently used
    prompts are dropped first."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()  # by last use
        self._sorted: list[tuple[int, ...]] = []
        self._tokens = 0

    def clear(self) -> None:
        self._entries.clear()
        self._sorted.clear()
        self._tokens = 0

    def get(self, prompt: tuple[int, ...]) -> CachedPrefix | None:
        """Return the entry of exactly this prompt."""
        if prompt in self._entries:
            self._entries.move_to_end(prompt)
        return self._entries.get(prompt)

    def longest(self, prompt: tuple[int, ...]) -> Prefix:
        """Return the longest cached prefix of a prompt, without its last token."""
        at = bisect_left(self._sorted, prompt)
        neighbours = self._sorted[max(0, at - 1) : at + 1]  # they share the longest prefix with it
        length, other = max(((common_prefix(prompt, other), other) for other in neighbours), default=(0, prompt))
        length = min(length, len(prompt) - 1)
        return self._entries[other].prefix.first(length) if length else Prefix(0)

    def add(self, prompt: tuple[int, ...], entry: CachedPrefix) -> CachedPrefix:
        """Cache a prompt; a cached prompt that it extends becomes the next to be dropped."""
        at = bisect_left(self._sorted, prompt)
        before = self._sorted[at - 1] if at else ()
        if before and common_prefix(before, prompt) == len(before):
            self._entries.move_to_end(before, last=False)
        insort(self._sorted, prompt)
        self._entries[prompt] = entry
        self._tokens += len(prompt)
        return entry

    def trim(self) -> None:
        limit = self._limit
        if limit is None and self._entries:
            prompt, newest = next(reversed(self._entries.items()))
            limit = usual_prefix_tokens(newest.prefix.nbytes // len(prompt))
        while self._tokens > (limit or 0):
            prompt, _ = self._entries.popitem(last=False)
            self._tokens -= len(prompt)
            del self._sorted[bisect_left(self._sorted, prompt)]
