"""A conversation once more, for a model with another tokenizer and chat template: it reads the same messages in its own
form, and the replies as they were written. Which of its tokens answer to which of ours is noted in spans."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.algorithms.alignment import shared_spans, text_ends
from whet.data.renderer import Renderer
from whet.errors import DataError
from whet.types import Span, Trajectory


@dataclass(slots=True)
class Retold:
    """A trajectory in the other model's tokens."""

    trajectory: Trajectory
    ours: list[int] = field(default_factory=list)  # the span of each of our trained tokens, in order
    theirs: list[int] = field(default_factory=list)  # that of each of its trained tokens
    spans: int = 0
    unlike: int = 0  # replies that the other tokenizer can't write as they are: one span each


def retell(trajectory: Trajectory, tokenizer: Any, renderer: Renderer, where: str) -> Retold:
    """``tokenizer`` is ours, ``renderer`` the other model's. The text of a reply and the tokens that end it are apart:
    what ends a turn here answers to what ends it there, whatever the two write for it.

    Raises ``DataError``, naming ``where``, unless the messages are known."""
    replies, messages = trajectory.spans[1::2], trajectory.messages
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    places = places[len(places) - len(replies) :] if len(replies) <= len(places) else []
    if len(places) != len(replies):
        raise DataError(f"{where}: a teacher with another tokenizer needs the messages of the whole conversation")
    retold, history, done = Retold(Trajectory([], messages=messages)), list[int](), 0
    for place, reply in zip(places, replies, strict=True):
        new = messages[done:place]
        given = renderer.render_next(history, new) if history else renderer.render_prompt(new)
        said = _reply(retold, reply, tokenizer, renderer)
        retold.trajectory.spans += [Span(given, trained=False), Span(said, trained=reply.trained)]
        history += given + said
        done = place + 1
    return retold


def _reply(retold: Retold, reply: Span, tokenizer: Any, renderer: Renderer) -> list[int]:
    """Our reply in the other model's tokens. Where it is trained, its spans are added to ``retold``."""
    ending = _special(tokenizer)
    end = len(reply.tokens)
    while end and reply.tokens[end - 1] in ending:
        end -= 1
    text, our_ends = text_ends(reply.tokens[:end], _decode(tokenizer))
    written = renderer.encode_text(text)
    closing = list(renderer.closing) if end < len(reply.tokens) else []
    if reply.trained:
        their_text, their_ends = text_ends(written, _decode(renderer.tokenizer))
        if their_text != text:
            retold.unlike += 1
            our_ends, their_ends = [len(text)] * len(our_ends), [len(text)] * len(their_ends)
        ours, theirs, count = shared_spans(our_ends, their_ends)
        if closing:
            ours += [count] * (len(reply.tokens) - end)
            theirs += [count] * len(closing)
            count += 1
        retold.ours += [retold.spans + span for span in ours]
        retold.theirs += [retold.spans + span for span in theirs]
        retold.spans += count
    return written + closing


def _special(tokenizer: Any) -> set[int]:
    marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def _decode(tokenizer: Any) -> Any:
    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode
