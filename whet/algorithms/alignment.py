"""Two tokenizations of one text, side by side: the shortest spans of text that begin and end where both have a token
begin and end. Tokens are compared by what they write, in characters, never by their ids."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def text_ends(tokens: Sequence[int], decode: Decode) -> tuple[str, list[int]]:
    """The text that the tokens write, and the number of its characters that are written after each token.

    A token that ends inside a character (a byte of an emoji) counts as ending where the character does. Tokens are
    decoded a few at a time, after the few before them, because some decoders write a token differently at the start.
    """
    text, ends, before, done = "", list[int](), 0, 0
    for end in range(1, len(tokens) + 1):
        written = decode(tokens[before:end])
        if written.endswith("\ufffd") and end < len(tokens):  # the bytes of a character that is not complete
            continue
        text += written[len(decode(tokens[before:done])) :]
        ends += [len(text)] * (end - done)
        before, done = done, end
    whole = decode(tokens)
    return whole, ends if text == whole else [len(whole)] * len(tokens)


def shared_spans(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int], int]:
    """The span that each of our and their tokens belongs to, and how many spans there are, given where the tokens end
    in the same text. A token that writes nothing belongs to the span that ends where it stands."""
    common = sorted(set(ours) & set(theirs))
    count = len(common) or int(bool(ours or theirs))
    return [bisect_left(common, end) for end in ours], [bisect_left(common, end) for end in theirs], count
