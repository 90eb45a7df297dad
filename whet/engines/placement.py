"""The choice of a replica for each request, by counts of tokens alone.

The outstanding tokens of a replica are, for each request in flight, the tokens of its prompt that were not cached there
and the tokens of its completion: as many as completions have had on average, at most the request's limit. A request
goes to the replica for which the sum of the outstanding tokens and ``weight`` x (tokens of its prompt that are not
cached there) is least. Cached are the texts that a replica was sent and has answered since the weights changed, in
blocks of 16 tokens, or of up to 1/32 of the text before them if that is more.

So an episode stays where its history is cached and the samples of a prompt meet where the prompt is, unless that
replica is so busy that computing the prompt again is the smaller cost; and a short beginning that all prompts have in
common draws none of them.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

_BLOCK = 16
_FINE = 5  # a block is at least this many binary digits shorter than the text before it

Beginning: TypeAlias = int
"""The number of its tokens, and in the last 32 bits their checksum. Two texts with the same one cost time only."""


class CachedTexts:
    """The beginnings of texts that each of some replicas has cached. Bounded, because a server's weights never change,
    so that entries would never be dropped; the least recent of a replica are dropped first."""

    most = 65_536  # beginnings of a replica

    def __init__(self, replicas: int) -> None:
        self._of = [OrderedDict[Beginning, None]() for _ in range(replicas)]
        self._where: dict[Beginning, int] = {}  # bit n: replica n has it

    def add(self, number: int, ends: Sequence[Beginning]) -> None:
        """Note that a replica has cached a text with these beginnings."""
        texts, bit = self._of[number], 1 << number
        for end in ends:
            if end in texts:
                texts.move_to_end(end)
            else:
                texts[end] = None
                self._where[end] = self._where.get(end, 0) | bit
        while len(texts) > self.most:
            self._forget(number, texts.popitem(last=False)[0])

    def longest(self, ends: Sequence[Beginning]) -> Iterator[tuple[int, int]]:
        """Yield (length, replicas) for each number of tokens of a text that replicas have cached, at most, from the
        longest on. Replicas are the bits of a number: bit n for replica n."""
        seen = 0
        for end in reversed(ends):
            if new := self._where.get(end, 0) & ~seen:
                seen |= new
                yield end >> 32, new

    def clear(self, number: int) -> None:
        """Forget the texts of a replica."""
        for end in self._of[number]:
            self._forget(number, end)
        self._of[number].clear()

    def _forget(self, number: int, end: Beginning) -> None:
        left = self._where[end] & ~(1 << number)
        if left:
            self._where[end] = left
        else:
            del self._where[end]


def _bits(mask: int) -> list[int]:
    """Return the positions of the bits that are set, ascending."""
    positions = []
    while mask:
        lowest = mask & -mask
        positions.append(lowest.bit_length() - 1)
        mask ^= lowest
    return positions


@dataclass(slots=True, frozen=True)
class Place:
    """The replica of a request in flight."""

    number: int
    cost: int  # outstanding tokens
    prompt: Sequence[Beginning] = ()


class Placement:
    """The requests and cached texts of ``replicas``, numbered from 0."""

    def __init__(self, replicas: int, weight: float) -> None:
        self.weight = weight
        self.outstanding = [0] * replicas  # tokens
        self._by_work = [(0, number) for number in range(replicas)]  # the same, the least first
        self.cached = CachedTexts(replicas)
        self._tokens = self._completions = 0  # of all requests so far

    def begin(self, serving: set[int], prompt: Sequence[int], limit: int, images: Sequence[str] = ()) -> Place:
        """Choose one of the replicas in ``serving``, at least one, for a completion of at most ``limit`` tokens."""
        ends = beginnings(prompt, images)
        least, idle = next(each for each in self._by_work if each[1] in serving)
        best = least + self.weight * len(prompt), idle, len(prompt)
        for length, replicas in self.cached.longest(ends):
            missing = len(prompt) - length
            if replicas >> idle & 1:
                best = min(best, (least + self.weight * missing, idle, missing))
                break  # the others have more to do, and no more cached
            if candidates := [number for number in _bits(replicas) if number in serving]:
                work, number = min((self.outstanding[number], number) for number in candidates)
                best = min(best, (work + self.weight * missing, number, missing))
        _, number, missing = best
        expected = min(limit, -(-self._tokens // self._completions)) if self._completions else limit
        place = Place(number, missing + expected, ends)
        self._add(number, place.cost)
        self.cached.add(number, ends)
        return place

    def end(self, place: Place) -> None:
        """Take a request out of the count, whether it is answered or not."""
        self._add(place.number, -place.cost)

    def _add(self, number: int, tokens: int) -> None:
        work = self.outstanding[number]
        del self._by_work[bisect_left(self._by_work, (work, number))]
        self.outstanding[number] = work + tokens
        insort(self._by_work, (work + tokens, number))

    def answered(self, place: Place, prompt: Sequence[int], tokens: Sequence[int], images: Sequence[str] = ()) -> None:
        """Note the ``tokens`` of a completion: they are cached too, except the last one."""
        self._tokens += len(tokens)
        self._completions += 1
        self.cached.add(place.number, beginnings([*prompt, *tokens[:-1]], images, place.prompt))

    def drop(self, number: int) -> None:
        """Forget the cached texts of a replica that is lost."""
        self.cached.clear(number)

    def clear(self) -> None:
        """Forget all cached texts, because nothing is cached under new weights."""
        self.cached = CachedTexts(len(self.outstanding))


def beginnings(tokens: Sequence[int], images: Sequence[str] = (), first: Sequence[Beginning] = ()) -> list[Beginning]:
    """Return each beginning of a text that is a number of whole blocks, and the text itself. ``first``: the beginnings
    of a text that this one begins with."""
    ends = list(first[:-1])
    start, checksum = divmod(ends[-1], 1 << 32) if ends else (0, crc32("\n".join(images).encode()))
    text = memoryview(array("i", tokens))
    for end in _block_ends(start, len(tokens)):
        checksum = crc32(text[start:end], checksum)
        ends.append(end << 32 | checksum)
        start = end
    return ends


def _block_ends(begin: int, end: int) -> list[int]:
    """Return the ends of the blocks of a text of ``end`` tokens, after the one that ends at ``begin``."""
    while _ENDS[-1] < end:
        _ENDS.append(_ENDS[-1] + max(_BLOCK, 1 << max(_ENDS[-1].bit_length() - 1 - _FINE, 0)))
    whole = _ENDS[bisect_right(_ENDS, begin) : bisect_left(_ENDS, end)]
    return [*whole, end] if begin < end else whole


_ENDS = [0]  # of the blocks of a long text
