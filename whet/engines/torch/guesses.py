"""Guessed tokens: what followed the same tokens earlier in a text is likely to follow again (prompt lookup).

A guess is verified by sampling: the model computes the logits after the newest token and after each guess in one
forward pass, and each token is drawn with the random number of its place. While the drawn tokens are the guessed ones,
the next draw counts, too. So tokens and log-probs are the same as without guesses, to the bit, whatever is guessed.

Guesses use only rows that a forward pass computes anyway, because it is filled up to a multiple of ``ROWS``. So they
help where few requests are in flight. Attention needs another turn for the first guesses of all rows, another for the
second ones, and so on; a turn must be worth its time. Knows neither logits nor the KV cache.
"""

from collections.abc import Sequence

import numpy as np

from whet.engines.config import NGram
from whet.engines.torch.tiles import padded

_TURN = 0.1  # the time of another turn of attention, as a share of a forward pass of SmolLM2-135M on a CPU
_MEMORY = 1000  # number of verified guesses after which older ones count half
_HOPE = 0.02  # guesses that count as kept where none was made, so that it is tried again some time


def find(text: np.ndarray, longest: int) -> tuple[int, int]:
    """Return the newest place where the last tokens of ``text`` [N] occurred before, as the index of the token after
    them, and their number: as many as possible, at most ``longest``. (N, 0) if the last token never occurred.

    >>> find(np.array([5, 1, 2, 8, 2, 9, 1, 2]), 4)
    (3, 2)
    """
    ends, length = np.flatnonzero(text[:-1] == text[-1]), 1
    if not len(ends):
        return len(text), 0
    while length < longest:
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1, length


class Guesser:
    """Guesses the next tokens of requests in flight, and learns how often guesses after repeated tokens are kept."""

    def __init__(self, settings: NGram) -> None:
        self.settings = settings
        self._verified = [2.0] * (settings.longest + 1)  # by the number of repeated tokens
        self._kept = [1.0] * (settings.longest + 1)
        self._lengths: list[int] = []  # of the last guesses: the number of repeated tokens

    def guess(self, texts: Sequence[np.ndarray], limits: Sequence[int]) -> list[list[int]]:
        """Return the guesses for each text: at most its limit, and altogether at most the spare rows of a forward pass,
        which go to the guesses that are most likely to be kept; no further ones where these are too few for a turn."""
        room = padded(len(texts)) - len(texts)
        guesses: list[list[int]] = [[] for _ in texts]
        self._lengths = [0] * len(texts)
        if not room:
            return guesses
        candidates: list[tuple[float, int, int, int]] = []  # chance, number of its turn, row, token
        for row, (text, limit) in enumerate(zip(texts, limits, strict=True)):
            start, length = find(text, self.settings.longest)
            if length < self.settings.shortest:
                continue
            self._lengths[row] = length
            rate, period = self._kept[length] / self._verified[length], len(text) - start
            for i in range(min(self.settings.tokens, limit, room)):
                candidates.append((rate ** (i + 1), i, row, int(text[start + i % period])))
        chosen = sorted(candidates, key=lambda candidate: -candidate[0])[:room]
        gains = [sum(chance for chance, turn, *_ in chosen if turn == i) for i in range(self.settings.tokens)]
        turns = next((i for i, gain in enumerate(gains) if gain < _TURN * len(texts)), len(gains))
        for _, turn, row, token in chosen:
            if turn < turns:
                guesses[row].append(token)
        for length in {length for length, guess in zip(self._lengths, guesses, strict=True) if length and not guess}:
            self._verified[length] += _HOPE
            self._kept[length] += _HOPE
        return guesses

    def verified(self, guesses: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        """Learn from how many of the last guesses were kept."""
        for length, guess, count in zip(self._lengths, guesses, kept, strict=True):
            if guess:
                self._verified[length] += min(count + 1, len(guess))
                self._kept[length] += count
                if self._verified[length] > _MEMORY:
                    self._verified[length] /= 2
                    self._kept[length] /= 2
