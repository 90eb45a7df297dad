"""The choice of a replica for each request, by counts of tokens alone.

The outstanding tokens of a replica are, for each request in flight, the tokens of its prompt that were not cached there
and the tokens of its completion: as many as completions have had on average, at most the request's limit. A request
goes to the replica for which the sum of the outstanding tokens and ``weight`` x (tokens of its prompt that are not
cached there) is least. Cached are, in blocks of 16 tokens, the texts that a replica was sent and has answered since the
weights changed.

So an episode stays where its history is cached and the samples of a prompt meet where the prompt is, unless that
replica is so busy that computing the prompt again is the smaller cost; and a short beginning that all prompts have in
common draws none of them.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BLOCK = 16


class CachedTexts:
    """The beginnings of texts that a replica has cached. Bounded, because a server's weights never change, so that
    entries would never be dropped; the least recent are dropped first."""

    most = 65_536  # beginnings, a million tokens

    def __init__(self) -> None:
        self._ends = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, ends: Sequence[tuple[int, bytes]]) -> None:
        for _, digest in ends:
            self._ends[digest] = None
            self._ends.move_to_end(digest)
        while len(self._ends) > self.most:
            self._ends.popitem(last=False)

    def longest(self, ends: Sequence[tuple[int, bytes]]) -> int:
        """Return the number of tokens that are cached of a text."""
        return next((length for length, digest in reversed(ends) if digest in self._ends), 0)

    def clear(self) -> None:
        self._ends.clear()


@dataclass(slots=True, frozen=True)
class Place:
    """The replica of a request in flight."""

    number: int
    cost: int  # outstanding tokens


class Placement:
    """The requests and cached texts of ``replicas``, numbered from 0."""

    def __init__(self, replicas: int, weight: float) -> None:
        self.weight = weight
        self.outstanding = [0] * replicas  # tokens
        self._cached = [CachedTexts() for _ in range(replicas)]
        self._tokens = self._completions = 0  # of all requests so far

    def begin(self, serving: set[int], prompt: Sequence[int], limit: int, images: Sequence[str] = ()) -> Place:
        """Choose one of the replicas in ``serving``, at least one, for a completion of at most ``limit`` tokens."""
        ends = list(beginnings(prompt, images))
        missing = {number: len(prompt) - self._cached[number].longest(ends) for number in sorted(serving)}
        number = min(missing, key=lambda each: self.outstanding[each] + self.weight * missing[each])
        expected = min(limit, -(-self._tokens // self._completions)) if self._completions else limit
        place = Place(number, missing[number] + expected)
        self.outstanding[number] += place.cost
        self._cached[number].add(ends)
        return place

    def end(self, place: Place) -> None:
        """Take a request out of the count, whether it is answered or not."""
        self.outstanding[place.number] -= place.cost

    def answered(self, place: Place, prompt: Sequence[int], tokens: Sequence[int], images: Sequence[str] = ()) -> None:
        """Note the ``tokens`` of a completion: they are cached too, except the last one."""
        self._tokens += len(tokens)
        self._completions += 1
        self._cached[place.number].add(list(beginnings([*prompt, *tokens[:-1]], images)))

    def drop(self, number: int) -> None:
        """Forget the cached texts of a replica that is lost."""
        self._cached[number].clear()

    def clear(self) -> None:
        """Forget all cached texts, because nothing is cached under new weights."""
        for cached in self._cached:
            cached.clear()


def beginnings(tokens: Sequence[int], images: Sequence[str] = ()) -> Iterator[tuple[int, bytes]]:
    """Yield the length and the digest of each beginning of a text that is a number of whole blocks, and of the text."""
    written, text = hashlib.blake2b("\n".join(images).encode(), digest_size=16), array("q", tokens)
    for start in range(0, len(text), _BLOCK):
        written.update(text[start : start + _BLOCK].tobytes())
        yield min(start + _BLOCK, len(text)), written.digest()
