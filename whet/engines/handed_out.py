"""Tokens that are handed out while a completion is sampled, though it may be sampled again from its first token."""

from collections.abc import Callable


class HandedOut:
    """Hands out each token of a completion once, though several attempts may sample it one after another."""

    def __init__(self, sampled: Callable[[list[int]], None]) -> None:
        self._sampled, self._count = sampled, 0

    def from_the_first(self) -> Callable[[list[int]], None]:
        """Return a receiver of the tokens of one attempt from its first one on."""
        received = 0

        def receive(tokens: list[int]) -> None:
            nonlocal received
            new = tokens[max(self._count - received, 0) :]
            received += len(tokens)
            if new:
                self._count += len(new)
                self._sampled(new)

        return receive
