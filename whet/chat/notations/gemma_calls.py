"""Calls of Gemma 4: ``call:NAME{KEY:VALUE}``, with texts between tokens for quotes."""

import re
from typing import Any

from whet.base.strict_json import STRICT
from whet.chat.notations.parts import Tools, closed

_NAME = re.compile(r"\s*call:([\w.-]+)\s*(?={)")
_QUOTE = '<|"|>'
_KEY = re.compile(r"\s*([^\s:{}\[\],<>][^:{}\[\],]{0,200}?)\s*:")
_VALUE = re.compile(r"[^,\]}]+")
_DEEPEST = 64  # most levels of lists and objects


def gemma_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read a call. See ``Block``."""
    if not (named := _NAME.match(text, at)):
        raise ValueError("it does not begin with call:NAME{")
    arguments, at = _value(text, named.end(), 0)
    return {"name": named[1], "arguments": arguments}, closed(text, at, after)


def _value(text: str, at: int, depth: int) -> tuple[object, int]:
    """Return the value at a position, and its end. Raises ``ValueError`` for anything else."""
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    while text[at : at + 1].isspace():
        at += 1
    if text.startswith(_QUOTE, at):
        return _quoted(text, at)
    if text.startswith(("{", "["), at):
        return _items(text, at, depth)
    written = _VALUE.match(text, at)
    if not written:
        raise ValueError("a value is missing")
    return STRICT.decode(written[0].strip()), written.end()


def _items(text: str, at: int, depth: int) -> tuple[object, int]:
    """Return the list or object at a position, and its end."""
    items, values, close = dict[str, Any](), list[Any](), "}" if text[at] == "{" else "]"
    at += 1
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if text.startswith(close, at):
            return (items if close == "}" else values), at + 1
        if items or values:
            if not text.startswith(",", at):
                raise ValueError(f"a comma or {close} is missing")
            at += 1
        if close == "}":
            key, at = _key(text, at)
            if key in items:
                raise ValueError(f"duplicate key {key!r}")
            items[key], at = _value(text, at, depth + 1)
        else:
            value, at = _value(text, at, depth + 1)
            values.append(value)


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        key, at = _quoted(text, at)
        if not text.startswith(":", at):
            raise ValueError("a colon is missing")
        return key, at + 1
    if not (written := _KEY.match(text, at)):
        raise ValueError("a key is missing")
    return written[1], written.end()


def _quoted(text: str, at: int) -> tuple[str, int]:
    start = at + len(_QUOTE)
    end = text.find(_QUOTE, start)
    if end < 0:
        raise ValueError("a text has no end")
    return text[start:end], end + len(_QUOTE)
