"""The layout of a model's work over ranks: which part of a batch or a vocabulary is here, and how parts are put
together. In these two classes everything is here; ``whet.parallel`` has those that communicate."""

from dataclasses import dataclass, field

from torch import Tensor


class Tokens:
    """The layout of a batch's N tokens, with padding, of which n are this rank's. Here: all of them."""

    spread = False
    multiple = 1  # N is padded to a multiple of this
    least = 0  # and to at least so many

    def padded(self, tokens: int) -> int:
        """Return N for a batch of so many tokens."""
        return -(-max(tokens, self.least) // self.multiple) * self.multiple

    def runs(self, tokens: int) -> list[range]:
        """Return this rank's tokens out of N, as runs of neighbours."""
        return [range(tokens)]

    def gather(self, rows: Tensor) -> Tensor:
        """Gather [n, ...] of each rank into [N, ...] in the batch's order. The backward pass sums over the ranks."""
        return rows

    def share(self, rows: Tensor) -> Tensor:
        """Return the part of [T] that this rank looks up in the vocabulary."""
        return rows

    def combine(self, column: Tensor) -> Tensor:
        """Turn a column that is 0 but for this rank's share into the whole column on every rank. Every rank must then
        compute the same loss from it: the backward pass takes each rank's gradient as it is."""
        return column


class Vocabulary:
    """The layout of a vocabulary. Here: all of it is on this rank."""

    start = 0  # the first word that is here

    def local(self, weight: Tensor) -> Tensor:
        """The rows of an output matrix (or of its bias) that are here."""
        return weight

    def sum(self, values: Tensor) -> Tensor:
        """Reduce over the ranks, element by element."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Reduce over the ranks, element by element."""
        return values

    def join(self, logits: Tensor) -> Tensor:
        """Gather [T, words here] of each rank into [T, V]."""
        return logits


@dataclass(slots=True, frozen=True)
class Shards:
    """The layout of one model's work."""

    tokens: Tokens = field(default_factory=Tokens)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)


WHOLE = Shards()
"""The layout of one rank that works alone."""
