"""Calls in JSON: between marks (Hermes, Qwen), bare (Llama 3), after a name (Mistral), as Llama 4 writes them, and
after a name between control tokens (DeepSeek V3 and R1, DeepSeek V3.1, Kimi K2)."""

import contextlib
import re
from typing import Any

from whet.base.strict_json import STRICT
from whet.chat.calls import why
from whet.chat.notations.arguments import functions
from whet.chat.notations.parts import SPACE, Parts, Tools, closed, skip
from whet.chat.notations.python_calls import LIKE_PYTHON, python_calls

_MARK = re.compile(r"<\|python_tag\|>|\[TOOL_CALLS\]")  # before bare JSON
_OWN_LINE = re.compile(r"^[ \t]*(?=[\[{])", re.MULTILINE)
_TRIES = 32  # most lines of a text that are tried as the beginning of a call
_LIKE_A_CALL = re.compile(r'[\s\[{]*"name"\s*:')
_FENCE = re.compile(r"```(?:json)?\s*```")
_BETWEEN = re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w*)\s*)?(?:\[ARGS\])?\s*(?={)")
_PYTHON = ("<|python_start|>", "<|python_end|>")
BARE = ("<|python_tag|>", "[TOOL_CALLS]", "```", *_PYTHON)
"""Marks with which the part of a reply begins that ``read_bare`` and ``read_llama4`` may remove; so does a line that
begins with a bracket."""


def json_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read a call or a list of calls; between marks, several of them. See ``Block``."""
    value, at = STRICT.raw_decode(text, skip(SPACE, text, at))
    while after and text[(at := skip(_BETWEEN, text, at)) :][:1] in ("{", "["):
        more, at = STRICT.raw_decode(text, at)
        value = [*(value if isinstance(value, list) else [value]), *(more if isinstance(more, list) else [more])]
    return (value, closed(text, at, after, "there is text after the JSON")) if after else (value, at)


def named_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read ``NAME[ARGS]{...}`` or ``NAME[CALL_ID]ID[ARGS]{...}``, or JSON as earlier models write it. See
    ``Block``."""
    if not (named := _NAMED.match(text, at)):
        return json_block(text, at, after, tools)
    arguments, at = STRICT.raw_decode(text, named.end())
    return {"name": named[1], "arguments": arguments, "id": named[2]}, at


def read_bare(text: str, parts: Parts, tools: Tools | None) -> str:
    """Add the calls without marks to ``parts``: a reply is JSON, ends in JSON after a mark, or has calls of declared
    tools on separate lines. Return the rest of the text."""
    mark = None if text.lstrip().startswith(("{", "[{")) else _MARK.search(text)
    body = (text[mark.end() :] if mark else text).strip().removesuffix("<|eom_id|>")
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    if not mark and not body.startswith(("{", "[")):
        return _on_own_lines(text, parts, tools)
    calls, at = list[Any](), 0
    try:
        while at < len(body):
            value, at = STRICT.raw_decode(body, at)
            calls += value if isinstance(value, list) else [value]
            at = skip(_BETWEEN, body, at)
        if mark or (calls and all(map(_is_call, calls))):
            parts.add(calls)
            return text[: mark.start()].strip() if mark else ""
    except ValueError as problem:
        rest = text if mark else _on_own_lines(text, parts, tools)
        if not parts.calls and (mark or _LIKE_A_CALL.match(body)):
            parts.errors.append(why(problem))
        return rest
    return text


def read_llama4(text: str, parts: Parts, tools: Tools | None) -> str:
    """Add the calls of a Llama 4 to ``parts``: JSON after its text between marks, which may be missing, or a Python
    list of calls. Return the rest of the text."""
    opening, closing = _PYTHON
    answer, mark, rest = text.partition(closing)
    answer = answer.strip().removeprefix(opening)
    if mark and rest.strip():
        before = len(parts.calls)
        left = read_bare(rest.strip(), parts, tools)
        return answer.strip() if len(parts.calls) > before else text if left else answer
    if LIKE_PYTHON.match(answer):
        try:
            parts.add(python_calls(answer))
        except (ValueError, RecursionError) as problem:
            parts.errors.append(why(problem))
            return text
        return ""
    return read_bare(answer, parts, tools) if answer != text else read_bare(text, parts, tools)


def _on_own_lines(text: str, parts: Parts, tools: Tools | None) -> str:
    """Add the calls of declared tools on separate lines to ``parts``. Return the rest of the text."""
    names = functions(tools).keys()
    kept, at = list[str](), 0
    for _, start in zip(range(_TRIES if names else 0), _OWN_LINE.finditer(text), strict=False):
        if start.start() < at:
            continue
        with contextlib.suppress(ValueError):
            value, end = STRICT.raw_decode(text, start.end())
            calls = value if isinstance(value, list) else [value]
            alone = not text[end:].lstrip(" \t;,").strip("\r")[:1].strip()
            if alone and calls and all(_is_call(call) and _function(call)["name"] in names for call in calls):
                parts.add(calls)
                kept, at = [*kept, text[at : start.start()]], end
    return _FENCE.sub("", "".join([*kept, text[at:]])).strip() if parts.calls else text


def _function(call: object) -> Any:
    return call.get("function", call) if isinstance(call, dict) else None


def _is_call(value: object) -> bool:
    """Return whether a JSON value has the form of a call. Other JSON may be the answer."""
    function = _function(value)
    return isinstance(function, dict) and "name" in function and bool({"arguments", "parameters"} & function.keys())


_DEEPSEEK = re.compile(r"\s*<｜tool▁call▁begin｜>\s*([\w.-]+)\s*<｜tool▁sep｜>")
_FENCED = re.compile(r"([\w.-]+)\s*```json\s*")  # V3 and R1 write the type first, then the name and a fence
_KIMI = re.compile(r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>")


def deepseek_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read calls of DeepSeek, each between its own control tokens. See ``Block``."""
    calls = []
    while begin := _DEEPSEEK.match(text, at):
        name, at = begin[1], begin.end()
        if fenced := _FENCED.match(text, at):
            name, at = fenced[1], fenced.end()
        arguments, at = STRICT.raw_decode(text, skip(SPACE, text, at))
        at = closed(text, at, "```", "its JSON is not in a closed fence") if fenced else at
        at = closed(text, at, "<｜tool▁call▁end｜>")
        calls.append({"name": name, "arguments": arguments})
    if not calls:
        raise ValueError("it does not begin with a name")
    return calls, closed(text, at, after)


def kimi_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read calls of Kimi K2, which begin with an id: the function's name and a number. See ``Block``."""
    calls = []
    while begin := _KIMI.match(text, at):
        arguments, at = STRICT.raw_decode(text, skip(SPACE, text, begin.end()))
        at = closed(text, at, "<|tool_call_end|>")
        calls.append({"name": begin[2], "arguments": arguments, "id": begin[1]})
    if not calls:
        raise ValueError("it does not begin with an id such as functions.name:0")
    return calls, closed(text, at, after)
