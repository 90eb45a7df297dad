"""Control tokens (``<|im_end|>``) come from the chat template only; text that spells one is tokenised as text.

A conversation is rendered twice: unchanged, and *hidden*, with every character of its texts that occurs in a control
token's spelling replaced by a character in an unassigned plane of Unicode. Both renderings have the same length, so a
control token in the hidden rendering was written by the template, regardless of the texts and of how the template joins
them. Texts without the first character of any control token need no hidden rendering.
"""

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, overload

from whet.base.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_RECENT = 16  # renderings whose tokens are kept
_HIDDEN, _WRITTEN = 0x40000, 0x50000  # unassigned planes: for hidden text, and for the template's control tokens
_UNASSIGNED = re.compile("[\U00040000-\U0005ffff]")
NO_TEXT = re.compile("[\ud800-\udfff\U00040000-\U0005ffff]")
"""Characters that no renderer accepts: the unassigned planes, and halves of surrogate pairs."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {"system", "user", "assistant", "tool", "developer"}  # a template may write the role in <|user|>


class ControlTokens:
    """The special tokens of a tokenizer, and other added tokens (``marks``) with which a template marks turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str, marks: Collection[str] = ()) -> None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        spellings = (special | set(marks)) - {tokenizer.unk_token}
        self.tokenizer = tokenizer
        self._ids: dict[str, int] = {spelling: tokenizer.convert_tokens_to_ids(spelling) for spelling in spellings}
        self._spelled = _any_of(spellings)
        letters = {letter for spelling in spellings for letter in spelling if not letter.isspace()}
        self._hidden = {ord(letter): _HIDDEN + ord(letter) for letter in letters}
        self._shown = {hidden: letter for letter, hidden in self._hidden.items()}
        # Names and quoted strings of the template, which it compares texts and keys with.
        self._names = _ROLES | {name for name in _names(template) if not self._spelled.search(name)}
        self._pieces = _any_of(spellings | self._names)
        first = "" if _begins_one(template, spellings) else "".join({re.escape(spelling[0]) for spelling in spellings})
        self._may_begin = re.compile(f"[{first}\U00040000-\U0005ffff]" if first else "")
        self._warned = False
        self._encoded = lru_cache(_RECENT)(self._encode)  # the samples of a prompt begin one after another

    def render(self, template: Callable[..., str], *values: object) -> str:
        """Return the hidden rendering: ``template`` called with ``values`` (messages, tools) whose texts are hidden.
        Raises ``DataError`` if that rendering shows another text than the plain one and a text spells a control
        token."""
        plain = template(*values)
        if not self._any_may_begin(values):
            return plain
        # The last attempt hides no single words, for templates that sort keys or capitalise types (Gemma 4).
        for but_names, but_words in ((False, False), (True, False), (True, True)):
            hidden_values = [self.hide(value, but_names, but_words) for value in values]
            with contextlib.suppress(DataError):
                hidden = template(*hidden_values)
                if self.show(hidden) == plain:
                    return hidden
        if spelled := self._spelled.search(json.dumps(values, ensure_ascii=False, default=str)):
            raise DataError(
                f"a text spells the control token {spelled[0]}, and the chat template changes its texts, so that the "
                "text can't be distinguished from the token; remove it from the text"
            )
        return plain

    def _any_may_begin(self, value: object) -> bool:
        """Return whether a control token could begin in a text of the value, or the template could begin one that a
        text continues."""
        if isinstance(value, str):
            return self._may_begin.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self._any_may_begin, value)) or any(map(self._any_may_begin, value.values()))
        return isinstance(value, list | tuple) and any(map(self._any_may_begin, value))

    @overload
    def hide(self, value: str, but_names: bool = False, but_words: bool = False) -> str: ...

    @overload
    def hide(self, value: object, but_names: bool = False, but_words: bool = False) -> object: ...

    def hide(self, value: object, but_names: bool = False, but_words: bool = False) -> object:
        """Return a copy with hidden characters in all texts, except texts that are names of the template; with
        ``but_names`` also except names within texts, with ``but_words`` except texts of a single word. Raises
        ``DataError`` for characters of an unassigned plane."""
        if isinstance(value, str):
            if invalid := _UNASSIGNED.search(value):
                raise DataError(
                    f"a text contains U+{ord(invalid[0]):X}, which is not a character of Unicode; remove it"
                )
            if but_words and value.isidentifier() and not self._spelled.search(value):
                return value
            pieces = self._pieces.split(value) if but_names else [value]
            return "".join(piece if piece in self._names else piece.translate(self._hidden) for piece in pieces)
        if isinstance(value, Mapping):
            items = value.items()
            return {self.hide(key, but_names, but_words): self.hide(part, but_names, but_words) for key, part in items}
        return [self.hide(part, but_names, but_words) for part in value] if isinstance(value, list | tuple) else value

    def show(self, hidden: str) -> str:
        """Return the plain rendering of a hidden one, of the same length."""
        return hidden.translate(self._shown)

    def alike(self, hidden: str, other: str) -> bool:
        """Return whether two renderings differ only in white space, and have the same control tokens."""
        words, other_words = ("".join(self.show(rendering).split()) for rendering in (hidden, other))
        return words == other_words and self._spelled.findall(hidden) == self._spelled.findall(other)

    def after_last(self, hidden: str) -> str:
        """Return the part of a hidden rendering after its last control token; all of it if it has none."""
        return self._spelled.split(hidden)[-1]

    def encode(self, hidden: str) -> list[int]:
        """Return the tokens of a hidden rendering. Raises ``DataError`` if the tokenizer can't encode a control token's
        spelling as text."""
        return list(self._encoded(hidden))

    def _encode(self, hidden: str) -> list[int]:
        text, written = self.show(hidden), self._spelled.findall(hidden)
        tokens = encoded(self.tokenizer, text)
        if self._count(tokens) <= len(written):
            return tokens
        if not self._warned:
            spelled = Counter(self._spelled.findall(text)) - Counter(written)
            log.warning("a text spells a control token, %s, and is tokenised as text", ", ".join(sorted(spelled)))
            self._warned = True
        plain, marks, ids = self._plain
        marked = self.show(self._spelled.sub(lambda match: marks[match[0]], hidden))
        tokens = [ids.get(token, token) for token in plain.encode(marked, add_special_tokens=False).ids]
        if self._count(tokens) != len(written):
            raise DataError("a text spells a control token, which this tokenizer can't encode as text; remove it")
        return tokens

    def _count(self, tokens: list[int]) -> int:
        control = set(self._ids.values())
        return sum(token in control for token in tokens)

    @cached_property
    def _plain(self) -> "tuple[Tokenizer, dict[str, str], dict[int, int]]":
        """Return a tokenizer whose control tokens are spelled as one unassigned character each, these characters by
        spelling, and the original ids of its ids."""
        from tokenizers import Tokenizer

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise DataError("a text spells a control token, which only a fast tokenizer can encode as text; remove it")
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        marks = {spelling: chr(_WRITTEN + number) for number, spelling in enumerate(sorted(self._ids))}
        added = {token["content"]: marks.get(token["content"], token["content"]) for token in state["added_tokens"]}
        for token in state["added_tokens"]:
            token["content"] = added[token["content"]]
        plain = Tokenizer.from_str(json.dumps(state))
        ids = {plain.token_to_id(mark): backend.token_to_id(spelling) for spelling, mark in added.items()}
        return plain, marks, {new: old for new, old in ids.items() if new is not None and old is not None}


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern with one group that matches any of the texts, the longest first."""
    return re.compile("(" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")" if texts else "(?!)")


def _names(template: str) -> set[str]:
    """Return the names and strings in a template's code."""
    return _tokens(template, "name", "string")


def _begins_one(template: str, spellings: Collection[str]) -> bool:
    """Return whether the template writes a value after the beginning of a control token, as in ``'<|' + role`` and
    ``'<|%s|>' % role``."""
    beginnings = {spelling[:end] for spelling in spellings for end in range(1, len(spelling))}
    texts = [piece for text in _tokens(template, "data", "string") for piece in re.split("[%{]", text)]
    return any(text[start:] in beginnings for text in texts for start in range(len(text)))


def _tokens(template: str, *types: str) -> set[str]:
    from jinja2 import Environment

    return {token.value for token in Environment().lexer.tokenize(template) if token.type in types}


def encoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text. Raises ``DataError`` if it is not Unicode."""
    try:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except TypeError:  # tokenizers takes a text that UTF-8 can't write for something else
        at = next((match.start() for match in _SURROGATE.finditer(text)), None)
        if at is None:
            raise
        raise DataError(
            f"a text has half a character, {text[at]!r} after {text[max(0, at - 20) : at]!r}, which can't be encoded; "
            "read its file as UTF-8, with errors='replace' where it is damaged"
        ) from None
    return tokens
