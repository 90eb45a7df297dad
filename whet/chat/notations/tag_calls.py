"""Calls whose arguments are written one by one in tags: Qwen3-Coder, Qwen 3.5 and Nemotron 3 (``<function=...>``), GLM
(``<arg_key>``), MiniMax M2 (``<invoke name=...>``). A call without an end is an error: it may have been cut between two
arguments."""

import re
from typing import Any

from whet.chat.notations.arguments import functions, typed, types_of
from whet.chat.notations.parts import SPACE, Tools, closed, ended, skip

_FUNCTION = re.compile(r"<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([\w.-]+)")
_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r'\s*<invoke name="([^">]+)">')
_NAMED_PARAMETER = re.compile(r'\s*<parameter name="([^">]+)">(.*?)</parameter>', re.DOTALL)


def tags_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>``. See ``Block``."""
    named = _FUNCTION.match(text, skip(SPACE, text, at))
    if not named:
        raise ValueError("it is not a function in tags")
    call, at = _call_of(named[1], _PARAMETER, "<parameter=", text, named.end(), tools)
    if after and text.startswith(after, skip(SPACE, text, at)):  # some models leave out the inner mark
        return call, ended(text, at, after)
    at = ended(text, at, "</function>")
    return call, ended(text, at, after) if text.startswith(after, skip(SPACE, text, at)) else at


def keys_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``. See ``Block``."""
    named = _NAME.match(text, at)
    if not named:
        raise ValueError("it does not begin with a name")
    call, at = _call_of(named[1], _KEY, "<arg_key>", text, named.end(), tools)
    return call, ended(text, at, after)


def invoke_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``, several times. See ``Block``."""
    calls = []
    while named := _INVOKE.match(text, at):
        call, at = _call_of(named[1], _NAMED_PARAMETER, '<parameter name="', text, named.end(), tools)
        at = ended(text, at, "</invoke>")
        calls.append(call)
    if not calls:
        raise ValueError("it is not a function in tags")
    return calls, closed(text, at, after)


def _call_of(
    name: str, pattern: re.Pattern[str], opening: str, text: str, at: int, tools: Tools | None
) -> tuple[object, int]:
    """Return a call and its end. ``pattern`` matches one argument."""
    arguments, parameters = dict[str, Any](), functions(tools).get(name, {})
    while argument := pattern.match(text, at):
        key, value = argument[1], argument[2]
        if opening in value or key in arguments:
            raise ValueError("an argument is duplicate, or has no end")
        arguments[key], at = typed(value, types_of(key, parameters)), argument.end()
    return {"name": name, "arguments": arguments}, at
