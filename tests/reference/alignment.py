"""Spans of text that two tokenizations share, by trying every place where the text could be cut."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def spans(ours: Sequence[int], theirs: Sequence[int], decode: Decode, their_decode: Decode) -> list[tuple[int, int]]:
    """(tokens of ours, tokens of theirs) up to and with each place where the text can be cut on both sides."""
    text = decode(ours)
    found = []
    for cut in range(len(text) + 1):
        here = ends_at(ours, text[:cut], decode)
        there = ends_at(theirs, text[:cut], their_decode)
        if here and there:
            found.append((here, there))
    return found


def ends_at(tokens: Sequence[int], text: str, decode: Decode) -> int:
    """The most tokens, from the first on, that write exactly the text; 0 where none do."""
    ways = [n for n in range(1, len(tokens) + 1) if decode(tokens[:n]) == text and "\ufffd" not in text]
    return max(ways, default=0)


def shares(ours: list[float], our_spans: list[int], theirs: list[float], their_spans: list[int]) -> list[float]:
    """Each token's share of what the two disagree about its span."""
    out = []
    for span in our_spans:
        mine = [x for x, s in zip(ours, our_spans, strict=True) if s == span]
        other = [x for x, s in zip(theirs, their_spans, strict=True) if s == span]
        out.append((sum(other) - sum(mine)) / len(mine) if other else 0.0)
    return out
