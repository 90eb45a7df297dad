"""A conversation in the tokens of another model: it reads the same messages in its own chat template, and the replies
as they were written. Which of its tokens stand for which of ours is noted in spans: the shortest stretches of text that
begin and end where both have a token begin and end. Tokens are compared by what they write, in characters.

    ours    |na|ive| café|      spans of ours    0 0 1
    theirs  |naive| ca|fé|      spans of theirs  0 1 1
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.types import Span, Trajectory

_OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Retokenized:
    """A trajectory in the other model's tokens."""

    trajectory: Trajectory
    ours: list[int] = field(default_factory=list)  # the span of each of our trained tokens, in order
    theirs: list[int] = field(default_factory=list)  # that of each of its trained tokens
    spans: int = 0
    unlike: int = 0  # replies that the other tokenizer can't write as they are: one span each


def retokenize(trajectory: Trajectory, tokenizer: Any, renderer: Renderer, where: str) -> Retokenized:
    """Render ``trajectory``, made with ``tokenizer``, for the model of ``renderer``.

    The text of a reply and the tokens that end it are apart: what ends a turn here stands for what ends it there,
    whatever the two write for it. Raises ``DataError``, naming ``where``, unless the messages are known, and prompts
    and replies take turns.
    """
    write = _decode(tokenizer)
    turns, messages = _turns(trajectory.spans, write, where), trajectory.messages
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    places = places[len(places) - len(turns) :] if len(turns) <= len(places) else []
    if len(places) != len(turns):
        raise DataError(f"{where}: a teacher with another tokenizer needs the messages of the whole conversation")
    result, history, done = Retokenized(Trajectory([], messages=messages)), list[int](), 0
    for place, (given, *reply) in zip(places, turns, strict=True):
        new = messages[done:place]
        asked = renderer.render_next(history, new) if history else renderer.render_prompt(new)
        asked += _opening(write(given.tokens), renderer.decode(asked), renderer)
        result.trajectory.spans.append(Span(asked, trained=False))
        for part in reply:
            written = _add_part(result, part, tokenizer, renderer)
            result.trajectory.spans.append(Span(written, trained=part.trained))
        history = result.trajectory.tokens
        done = place + 1
    return result


def _turns(spans: Sequence[Span], write: Decode, where: str) -> list[list[Span]]:
    """Return what is given before each reply and the reply: a span, or three where a budget has ended its thoughts,
    which ``</think>`` parts from the answer. Raises ``DataError`` where it is otherwise."""
    turns = list[list[Span]]()
    for given, reply in zip(spans[::2], spans[1::2], strict=False):
        if given.trained or given.logprobs is not None:
            raise DataError(
                f"{where}: a teacher with another tokenizer scores replies alone, and here the prompt is learned from, "
                "too; set data.train_on=assistant, or choose a teacher with the student's tokenizer"
            )
        if turns and write(given.tokens).strip() == "</think>":
            turns[-1] += [given, reply]
        else:
            turns.append([given, reply])
    return turns


def _opening(ours: str, theirs: str, renderer: Renderer) -> list[int]:
    """Return the beginning of thoughts, or the empty thoughts, that stand before our reply and not yet in theirs."""
    found = _OPENED.search(ours)
    return renderer.encode_text(found[0]) if found and not _OPENED.search(theirs) else []


def _add_part(result: Retokenized, reply: Span, tokenizer: Any, renderer: Renderer) -> list[int]:
    """Return a part of our reply in the other model's tokens. Where it is trained, add its spans to ``result``."""
    ending = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ending |= set(tokenizer.all_special_ids)
    end = len(reply.tokens)
    while end and reply.tokens[end - 1] in ending:
        end -= 1
    text, our_ends = text_ends(reply.tokens[:end], _decode(tokenizer))
    written = renderer.encode_text(text)
    closing = list(renderer.closing) if end < len(reply.tokens) else []
    if reply.trained:
        their_text, their_ends = text_ends(written, _decode(renderer.tokenizer))
        if their_text != text:
            result.unlike += 1
            our_ends, their_ends = [len(text)] * len(our_ends), [len(text)] * len(their_ends)
        ours, theirs, count = shared_spans(our_ends, their_ends)
        if closing:
            ours += [count] * (len(reply.tokens) - end)
            theirs += [count] * len(closing)
            count += 1
        result.ours += [result.spans + span for span in ours]
        result.theirs += [result.spans + span for span in theirs]
        result.spans += count
    return written + closing


def _decode(tokenizer: Any) -> Decode:
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def text_ends(tokens: Sequence[int], decode: Decode) -> tuple[str, list[int]]:
    """Return the text that the tokens write, and how many of its characters are written after each token.

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
    """Return the span that each of our and their tokens belongs to, and how many spans there are, given where the
    tokens end in the same text. A token that writes nothing belongs to the span that ends where it stands."""
    common = sorted(set(ours) & set(theirs))
    count = len(common) or int(bool(ours or theirs))
    return [bisect_left(common, end) for end in ours], [bisect_left(common, end) for end in theirs], count
