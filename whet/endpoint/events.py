"""The server-sent events of one answer, in the order in which it is sampled; each API has a subclass."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator

from whet.base.strict_json import JsonObject
from whet.endpoint.request import ApiError

_PIECE = 64  # most characters of a streamed piece


class Events(ABC):
    """Yields events. ``begin`` first, then ``more`` any number of times, then ``end`` or ``failed``."""

    def __init__(self, begun: JsonObject) -> None:
        """``begun``: the body of an empty answer, with the id and the prompt's number of tokens of this one."""
        self.begun = begun
        self.thought = self.text = ""  # what was yielded

    def more(self, thought: str, text: str) -> Iterator[str]:
        """Yield what the thought and the text so far have more than before. Raises ``ValueError`` if they don't begin
        with what was yielded."""
        for kind, yielded, whole in (("thought", self.thought, thought), ("text", self.text, text)):
            if not whole.startswith(yielded):
                raise ValueError(f"the {kind} of a reply has changed while it was streamed")
        for piece in pieces(thought[len(self.thought) :]):
            yield from self.thought_piece(piece)
            self.thought += piece
        for piece in pieces(text[len(self.text) :]):
            yield from self.text_piece(piece)
            self.text += piece

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yield the first events."""

    @abstractmethod
    def thought_piece(self, piece: str) -> Iterator[str]:
        """Yield the next piece of the thought."""

    @abstractmethod
    def text_piece(self, piece: str) -> Iterator[str]:
        """Yield the next piece of the text; the thought has ended."""

    @abstractmethod
    def end(self, body: dict[str, object]) -> Iterator[str]:
        """Yield the calls and the end of the whole answer, whose thought and text were yielded."""

    @abstractmethod
    def failed(self, error: ApiError) -> str:
        """Return the event of an error after the beginning."""


def pieces(text: str) -> Iterator[str]:
    """Split a text for streaming."""
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def event(kind: str, **data: object) -> str:
    """Return an event with a name, which is also its type."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"
