"""The layout of a model's work over ranks: this rank's part of a batch or a vocabulary, and the collectives that
combine parts. The classes here are for a single rank; ``whet.parallel`` has the ones that communicate."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn


class Tokens:
    """The layout of a batch's N tokens, with padding, of which n are this rank's. Here: all of them."""

    spread = False
    multiple = 1  # N is padded to a multiple of this
    least = 0  # and to at least this number

    def padded(self, tokens: int) -> int:
        """Return N for a batch of ``tokens`` tokens."""
        return -(-max(tokens, self.least) // self.multiple) * self.multiple

    def runs(self, tokens: int) -> list[range]:
        """Return this rank's tokens out of N, as contiguous ranges."""
        return [range(tokens)]

    def between_matrices(self, tokens: int) -> slice:
        """Return the tokens, of this rank's n, whose hidden states it has between matrices. Here: all of them."""
        return slice(tokens)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather [n, ...] of each rank into [N, ...] in the batch's order. The backward pass sums over the ranks."""
        return rows

    def local_slice(self, rows: Tensor) -> Tensor:
        """Return this rank's slice of rows [T] for lookups in the vocabulary."""
        return rows

    def all_reduce(self, column: Tensor) -> Tensor:
        """Return on every rank the whole column, from columns that are 0 except for each rank's slice. Every rank must
        then compute the same loss from it: the backward pass uses each rank's gradient unchanged."""
        return column


class Vocabulary:
    """The layout of a vocabulary. Here: all of it is on this rank."""

    start = 0  # the first word on this rank

    def local(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of an output matrix (or of its bias)."""
        return weight

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        return values

    def all_gather(self, logits: Tensor) -> Tensor:
        """Gather the logits [T, local words] of each rank into [T, V]."""
        return logits


class Parameters:
    """The layout of parameters in files and in gradients. Here: each is stored as it is, under its name."""

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors under which a parameter, or a tensor of its shape, is stored, by their names. ``name`` may
        begin with a kind of state: KIND/NAME."""
        return {name: tensor}

    def restore(self, name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Set ``tensor`` to what ``stored`` has returned for it and other code has filled. Here they share memory."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of the backward passes of a step. Here they need none."""
        return nullcontext()

    def gradients(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the summed gradient of a parameter as it would be stored. The parameter must have one."""
        assert parameter.grad is not None
        return self.stored(name, parameter.grad)

    def sum_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Sum over ranks what the backward passes of a step have not summed. Here: nothing."""


@dataclass(slots=True, frozen=True)
class Shards:
    """The layout of one model's work."""

    tokens: Tokens = field(default_factory=Tokens)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    parameters: Parameters = field(default_factory=Parameters)


WHOLE = Shards()
"""The layout of a single rank."""
