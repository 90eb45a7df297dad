"""Conversion of a conversation to the tokens of another model, which renders the same messages with its chat template,
and the replies with their exact text. The correspondence of tokens is given by spans: the shortest parts of the text
that begin and end at token boundaries of both models. Tokens are compared by their text, in characters.

    ours    |na|ive| café|      spans of ours    0 0 1
    theirs  |naive| ca|fé|      spans of theirs  0 1 1
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.types import Span, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Retokenized:
    """A trajectory in the other model's tokens."""

    trajectory: Trajectory
    ours: list[int] = field(default_factory=list)  # the span of each of our trained tokens, in order
    theirs: list[int] = field(default_factory=list)  # the span of each of its trained tokens
    spans: int = 0
    unlike: int = 0  # replies whose exact text the other tokenizer can't encode: one span each


def retokenize(
    trajectory: Trajectory, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer, where: str
) -> Retokenized:
    """Render ``trajectory``, made with ``tokenizer``, for the model of ``renderer``.

    The text of a reply and the tokens that end it are separate: the end of a turn in our tokens corresponds to the end
    of a turn in theirs, even if it is written differently. Raises ``DataError``, naming ``where``, unless the messages
    are available, and prompts and replies alternate.
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
    """Return for each reply the tokens before it and the reply: one span, or three if a budget has ended its thoughts,
    with ``</think>`` between them and the answer. Raises ``DataError`` otherwise."""
    turns = list[list[Span]]()
    for given, reply in zip(spans[::2], spans[1::2], strict=False):
        if given.trained or given.logprobs is not None:
            raise DataError(
                f"{where}: a teacher with another tokenizer scores replies alone, but here the prompt is trained "
                "too; set data.train_on=assistant, or choose a teacher with the student's tokenizer"
            )
        if turns and write(given.tokens).strip() == "</think>":
            turns[-1] += [given, reply]
        else:
            turns.append([given, reply])
    return turns


def _opening(ours: str, theirs: str, renderer: Renderer) -> list[int]:
    """Return the beginning of thoughts, or the empty thoughts, that precede our reply and are missing in theirs."""
    opened = _OPENED.search(ours)
    return renderer.encode_text(opened[0]) if opened and not _OPENED.search(theirs) else []


def _add_part(result: Retokenized, reply: Span, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer) -> list[int]:
    """Return a part of our reply in the other model's tokens. If it is trained, add its spans to ``result``."""
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


def _decode(tokenizer: "PreTrainedTokenizerBase") -> Decode:
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def text_ends(tokens: Sequence[int], decode: Decode) -> tuple[str, list[int]]:
    """Return the tokens' text, and the number of its characters up to each token's end.

    A token that ends inside a character (a byte of an emoji) counts as ending at the end of the character. Tokens are
    decoded a few at a time, after the few before them, because some decoders treat the first token differently.
    """
    text, ends, before, done = "", list[int](), 0, 0
    for end in range(1, len(tokens) + 1):
        written = decode(tokens[before:end])
        if written.endswith("\ufffd") and end < len(tokens):  # the bytes of an incomplete character
            continue
        text += written[len(decode(tokens[before:done])) :]
        ends += [len(text)] * (end - done)
        before, done = done, end
    whole = decode(tokens)
    return whole, ends if text == whole else [len(whole)] * len(tokens)


def shared_spans(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Return the span of each of our and their tokens, and the number of spans, given the ends of tokens in the same
    text. A token without text belongs to the span that ends at its position."""
    common = sorted(set(ours) & set(theirs))
    count = len(common) or int(bool(ours or theirs))
    return [bisect_left(common, end) for end in ours], [bisect_left(common, end) for end in theirs], count
