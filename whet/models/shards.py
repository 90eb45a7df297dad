"""What a model needs to know where its batch or its vocabulary is spread over ranks: which part is here, and how parts
are put together. These two say that everything is here; ``whet.parallel`` has those that speak to other ranks."""

from dataclasses import dataclass, field

from torch import Tensor


class Tokens:
    """All tokens of a batch are on this rank. N tokens, with padding; n of them are this rank's."""

    spread = False
    multiple = 1  # N is padded to a multiple of this
    least = 0  # and to at least so many

    def padded(self, tokens: int) -> int:
        """N of a batch of so many tokens."""
        return -(-max(tokens, self.least) // self.multiple) * self.multiple

    def runs(self, tokens: int) -> list[range]:
        """This rank's tokens out of N, as runs of neighbours."""
        return [range(tokens)]

    def gather(self, rows: Tensor) -> Tensor:
        """[n, ...] of each rank -> [N, ...] in the batch's order. The backward pass sums over the ranks."""
        return rows

    def share(self, rows: Tensor) -> Tensor:
        """The part of [T] that this rank looks up in the vocabulary."""
        return rows

    def combine(self, column: Tensor) -> Tensor:
        """A column that is 0 but for this rank's share -> the whole column on every rank. Every rank must then compute
        the same loss from it: the backward pass takes each rank's gradient as it is."""
        return column


class Vocabulary:
    """The whole vocabulary is on this rank."""

    start = 0  # the first word that is here

    def local(self, weight: Tensor) -> Tensor:
        """The rows of an output matrix (or of its bias) that are here."""
        return weight

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks, element by element."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Over the ranks, element by element."""
        return values

    def join(self, logits: Tensor) -> Tensor:
        """[T, words here] of each rank -> [T, V]"""
        return logits


@dataclass(slots=True, frozen=True)
class Shards:
    """How one model's work is spread."""

    tokens: Tokens = field(default_factory=Tokens)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)


WHOLE = Shards()
"""Everything is on this rank."""
