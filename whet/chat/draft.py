"""The part of an unfinished reply that is decided: no token that follows can change it. Text that may be the beginning
of a thought's end or of a call is not decided yet, nor is white space that parsing may remove."""

import re
from collections.abc import Sequence

from whet.chat.call_formats import CallFormat
from whet.chat.control_tokens import NO_TEXT
from whet.chat.notations.json_calls import BARE
from whet.chat.renderer import Renderer
from whet.chat.replies import ReplyFormat
from whet.chat.thinking import TAGS

_CUT = "\ufffd"  # what a tokenizer shows for a character whose last bytes are missing


class Draft:
    """Reads a reply while it is sampled. ``thought`` and ``text`` are the beginnings of what ``Renderer.parse_reply``
    returns for the whole reply, and only grow. They stay empty for formats whose replies can only be read as a
    whole: of gpt-oss, and of tokenizers with a ``response_template`` or that clean up spaces.

    ``thinking``: thoughts are separated even if the chat template writes none (``split_thinking``).
    """

    def __init__(self, renderer: Renderer, thinking: bool = False) -> None:
        self.thought = self.text = ""
        self.tokens: list[int] = []
        self._renderer, self._thinking = renderer, thinking
        cleans = bool(renderer.tokenizer.clean_up_tokenization_spaces)
        self._format = renderer.replies if isinstance(renderer.replies, ReplyFormat) and not cleans else None
        self._read = ""  # the text of the first ``_end`` tokens
        self._start = self._end = 0  # the newest tokens are decoded after those between, on which their text depends

    def add(self, tokens: Sequence[int]) -> bool:
        """Append sampled tokens. Return whether more is decided than before."""
        self.tokens += tokens
        before = self.thought, self.text
        if self._format is not None and self._decode():
            self.thought, self.text = decided(self._format, self._read, self._thinking)
        return (self.thought, self.text) != before

    def _decode(self) -> bool:
        """Decode the new tokens, up to the last whole character. Return whether there are any."""
        end, stops = len(self.tokens), self._renderer.stop_token_ids
        while end and self.tokens[end - 1] in stops:  # they belong to the reply only if others follow
            end -= 1
        earlier = self._renderer.decode(self.tokens[self._start : self._end])
        text = self._renderer.decode(self.tokens[self._start : end])
        if end <= self._end or text.endswith(_CUT) or len(text) <= len(earlier):
            return False
        self._read += NO_TEXT.sub("\ufffd", text[len(earlier) :])
        self._start, self._end = self._end, end
        return True


def decided(format: ReplyFormat, text: str, thinking: bool = False) -> tuple[str, str]:
    """Return the beginnings of the thought and of the text that every reply beginning with ``text`` has."""
    if format.thoughts is None:  # calls are read first
        text = _before_calls(format.calls, text)
        if not thinking:
            return "", text
    opening, closing = marks = format.thoughts or TAGS
    begun = text.lstrip()
    if opening.startswith(begun):
        return "", ""
    starts = begun.startswith(opening)
    opened = format.opened and format.thoughts is not None
    if marks != TAGS and not (starts or opened or closing in text):
        return "", ""  # a closing mark that follows makes all of it a thought
    thought = ""
    if starts or opened or marks != TAGS:
        thought, ended, text = (begun.removeprefix(opening) if starts else text).partition(closing)
        if not ended:
            return without_beginning(thought, (closing,)).strip("\n"), ""
        thought, text = thought.strip("\n"), text.lstrip("\n")
    return thought, text if format.thoughts is None else _before_calls(format.calls, text)


def _before_calls(format: CallFormat | None, text: str) -> str:
    """Return the text before anything that may be a call. Where a reply has calls, the white space at its ends is
    removed."""
    if format is None:
        return text
    bare = format.body == "llama4" or not (format.before or format.body == "tags")
    marks = BARE if bare else tuple(filter(None, (format.before, "<function=" if format.body == "tags" else "")))
    begins = "|".join([*map(re.escape, marks), *([r"(?m:^[ \t]*[\[{])"] if bare else [])])
    if text[:1].isspace():
        return ""
    if mark := re.search(begins, text):
        return text[: mark.start()].rstrip()
    return without_beginning(text, marks).rstrip()


def without_beginning(text: str, marks: Sequence[str]) -> str:
    """Return the text without an end that may be the beginning of a mark."""
    partial = (size for each in marks for size in range(len(each) - 1, 0, -1) if text.endswith(each[:size]))
    return text[: len(text) - max(partial, default=0)]
