"""Spans of text that two tokenizations share, by trying every place where the text could be cut."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def spans(ours: Sequence[int], theirs: Sequence[int], decode: Decode, their_decode: Decode) -> list[tuple[int, int]]:
    """(tokens of ours, tokens of theirs) up to and with each place where the text can be cut on both sides."""
    text = decode(ours)
    found = []
    for cut in range(len(text) + 1):
        here = [i for i in range(len(ours) + 1) if decode(ours[:i]) == text[:cut] and whole(ours[:i], decode)]
        there = [
            j for j in range(len(theirs) + 1) if their_decode(theirs[:j]) == text[:cut] and whole(theirs[:j], their_decode)
        ]
        if here and there and here[-1] and there[-1]:
            found.append((here[-1], there[-1]))
    return found


def whole(tokens: Sequence[int], decode: Decode) -> bool:
    return "\ufffd" not in decode(tokens)


def shares(ours: list[float], our_spans: list[int], theirs: list[float], their_spans: list[int]) -> list[float]:
    """Each token's share of what the two disagree about its span."""
    out = []
    for span in our_spans:
        mine = [x for x, s in zip(ours, our_spans, strict=True) if s == span]
        other = [x for x, s in zip(theirs, their_spans, strict=True) if s == span]
        out.append((sum(other) - sum(mine)) / len(mine) if other else 0.0)
    return out
