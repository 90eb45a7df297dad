"""The formats of tool calls by families of models. A model's format is detected by rendering a sample call with its
template, and verified by parsing the result.

Hermes, Qwen        <tool_call>{"name": ..., "arguments": {...}}</tool_call>     json, by other marks: Granite, Phi,
Llama 3             {"name": ..., "parameters": {...}}                            MiniMax M1, Nemotron, InternLM
Qwen3-Coder         <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>     tags
GLM                 <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>         keys
Mistral             [TOOL_CALLS]NAME[ARGS]{...}                                                          named
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.base.strict_json import STRICT
from whet.chat.calls import checked_call, why
from whet.core.types import ToolCall

Tools = Sequence[Mapping[str, Any]]

_ARGUMENTS = {"whetkey": "whetvalue", "whetlist": [1, {"whetdeep": True}], "whetcount": 2}
# Calls in a conversation that is rendered only to detect the template's format.
SAMPLES = [checked_call({"name": "whetname", "arguments": _ARGUMENTS | {"whetcount": 2 + i}}, i) for i in range(2)]
_TYPES = {"whetkey": "string", "whetlist": "array", "whetcount": "integer"}
SAMPLE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "whetname",
        "description": "whetdescription",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": type, "description": "whetabout"} for name, type in _TYPES.items()},
        },
    },
}
MOST = 128  # most calls of a reply
_MARK = re.compile(r"<\|python_tag\|>|\[TOOL_CALLS\]")  # before bare JSON
_OWN_LINE = re.compile(r"^[ \t]*(?=[\[{])", re.MULTILINE)
_TRIES = 32  # most lines of a text that are tried as the beginning of a call
_LIKE_A_CALL = re.compile(r'[\s\[{]*"name"\s*:')
_FENCE = re.compile(r"```(?:json)?\s*```")
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;,]*")
_FUNCTION = re.compile(r"<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYS_NAME = re.compile(r"\s*([\w.-]+)")
_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?={)")
_WORDS = {"True": True, "False": False, "None": None}  # the spelling of these values in some templates
# Beginnings of calls by other families, which are errors in the reply of a model with another format.
_FOREIGN = re.compile(
    r"<\|?tool_calls?\|?>|<TOOLCALL>|\[TOOL_CALLS\]|<function=\w|<\|python_tag\|>|\bfunctools\[|<\|action_start\|>"
    r"|<｜tool▁calls?▁begin｜>|<\|tool_calls?_(?:section_)?begin\|>|<minimax:tool_call>|<\|tool_call_start\|>"
)


@dataclass(slots=True)
class Parts:
    """The parts of a reply."""

    text: str = ""  # without the calls
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of texts that look like calls but can't be parsed

    def add(self, value: Any) -> None:
        """Add the calls in a JSON value, a call or a list. Raises ``ValueError`` without adding any if one is
        invalid."""
        values = value if isinstance(value, list) else [value]
        self.calls += [checked_call(call, len(self.calls) + number) for number, call in enumerate(values)]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The marks around the calls of a reply, and the notation of a call."""

    body: Literal["json", "tags", "keys", "named"]
    before: str = ""  # empty: calls have no mark
    after: str = ""

    def read(self, text: str, tools: Tools | None = None) -> Parts:
        """Return the parts of a reply. The schemas of ``tools`` determine the types of arguments."""
        parts = Parts()
        parts.text = _bare(text, parts, tools) if self.body == "json" and not self.before else ""
        if self.before or self.body != "json":
            parts.text = self._marked(text, parts, tools)
        if len(parts.calls) > MOST:
            parts.calls = parts.calls[:MOST]
            parts.errors.append(f"only the first {MOST} calls of a reply are read")
        if tools and not (parts.calls or parts.errors) and (mark := _FOREIGN.search(parts.text)):
            parts.errors.append(f"it begins with {mark[0]}, and this model writes calls otherwise")
        return parts

    def _marked(self, text: str, parts: Parts, tools: Tools | None) -> str:
        """Add the calls between marks to ``parts``. Returns the rest of the text."""
        begins = [re.escape(self.before)] * bool(self.before) + [r"(?=<function=)"] * (self.body == "tags")
        begin = re.compile("|".join(begins))
        kept, at = list[str](), 0
        while (start := begin.search(text, at)) and len(parts.calls) <= MOST and len(parts.errors) < MOST:
            kept.append(text[at : start.start()])
            try:
                value, at = self._block(text, start.end(), tools)
                parts.add(value)
            except (ValueError, RecursionError) as problem:
                parts.errors.append(why(problem))
                at = self._end(text, max(start.end(), start.start() + 1), begin)
                kept.append(text[start.start() : at])
        return "".join([*kept, text[at:]]).strip() if kept else text

    def _end(self, text: str, at: int, begin: re.Pattern[str]) -> int:
        """Return the end of a block that can't be parsed: after its closing mark, or before the next block."""
        if self.after:
            closing = text.find(self.after, at)
            return closing + len(self.after) if closing >= 0 else len(text)
        following = begin.search(text, at)
        return following.start() if following else len(text)

    def _block(self, text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
        """Return the calls between two marks, and their end. Strings of JSON may contain marks. The last closing mark
        may be missing."""
        if self.body == "tags":
            return self._with_tags(text, at, tools)
        if self.body == "keys":
            value, at = _with_keys(text, at, tools)
        elif self.body == "named":
            value, at = _with_name(text, at)
        else:
            value, at = STRICT.raw_decode(text, _skip(_SPACE, text, at))
            while self.after and text[(at := _skip(_BETWEEN, text, at)) :][:1] in ("{", "["):
                more, at = STRICT.raw_decode(text, at)
                value = [
                    *(value if isinstance(value, list) else [value]),
                    *(more if isinstance(more, list) else [more]),
                ]
        if not self.after:
            return value, at
        at = _skip(_SPACE, text, at)
        if at < len(text) and not text.startswith(self.after, at):
            raise ValueError("there is text after the JSON" if self.body == "json" else "its end is not marked")
        return value, min(len(text), at + len(self.after))

    def _with_tags(self, text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
        named = _FUNCTION.match(text, _skip(_SPACE, text, at))
        if not named:
            raise ValueError("it is not a function in tags")
        call, at = _call_of(named[1], _PARAMETER, "<parameter=", text, named.end(), tools)
        at = _skip(_SPACE, text, at)
        for end in ("</function>", self.after):
            if text.startswith(end, at):
                at += len(end)
                at = _skip(_SPACE, text, at) if text.startswith(self.after, _skip(_SPACE, text, at)) else at
            elif end == "</function>" and at < len(text) and not text.startswith(self.after or "</function>", at):
                raise ValueError("its parameters are not in closed tags")
        return call, at


def format_of(written: str) -> CallFormat | None:
    """Return the format of a text in which a chat template has written the first of ``SAMPLES``; None for a format that
    whet doesn't support."""
    formats = (format for format in _candidates(written) if "whet" not in format.before + format.after)
    return next((format for format in formats if _same_calls(format.read(written, [SAMPLE_TOOL]), 1)), None)


def reads_back(format: CallFormat, written: str) -> bool:
    """Return whether the format parses all of ``SAMPLES`` from the text in which a template has written them, or
    reports an error."""
    parts = format.read(written, [SAMPLE_TOOL])
    return bool(parts.errors) or _same_calls(parts, len(SAMPLES))


def _same_calls(parts: Parts, number: int) -> bool:
    """Return whether a reply has the first ``number`` of ``SAMPLES`` and nothing else."""
    calls, expected = ([call["function"] for call in calls] for calls in (parts.calls, SAMPLES[:number]))
    return calls == expected and not parts.text and not parts.errors


def _candidates(written: str) -> Iterator[CallFormat]:
    """Yield the formats in which the first of ``SAMPLES`` may be written in a text."""
    name = written.find("whetname")
    if (tags := written.find("<function=whetname>")) >= 0:
        yield CallFormat("tags", written[:tags].strip(), written.rpartition("</function>")[2].strip())
    elif re.match(r"whetname\s*<arg_key>", written[max(0, name) :]):
        yield CallFormat("keys", written[:name].strip(), written.rpartition("</arg_value>")[2].strip())
    elif name >= 0 and written[:name].strip() == "[TOOL_CALLS]":
        yield CallFormat("named", "[TOOL_CALLS]")
    for start in re.finditer(r"[\[{]", written[: max(0, name)]):
        with contextlib.suppress(ValueError):
            _, end = STRICT.raw_decode(written, start.start())
            before, after = written[: start.start()].strip(), written[end:].strip()
            yield CallFormat("json", before, after) if before else CallFormat("json")


def _with_keys(text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
    named = _KEYS_NAME.match(text, at)
    if not named:
        raise ValueError("it does not begin with a name")
    return _call_of(named[1], _KEY, "<arg_key>", text, named.end(), tools)


def _with_name(text: str, at: int) -> tuple[Any, int]:
    if not (named := _NAMED.match(text, at)):
        return STRICT.raw_decode(text, _skip(_SPACE, text, at))  # the format of earlier models of the family
    arguments, at = STRICT.raw_decode(text, named.end())
    return {"name": named[1], "arguments": arguments}, at


def _call_of(
    name: str, pattern: re.Pattern[str], opening: str, text: str, at: int, tools: Tools | None
) -> tuple[Any, int]:
    """Return a call whose arguments are written one by one, and its end. ``pattern`` matches one argument."""
    arguments, parameters = dict[str, Any](), _functions(tools).get(name, {})
    while argument := pattern.match(text, at):
        key, value = argument[1], argument[2]
        if opening in value or key in arguments:
            raise ValueError("an argument is duplicate, or has no end")
        arguments[key], at = _typed(value, _types_of(key, parameters)), argument.end()
    return {"name": name, "arguments": arguments}, at


def _functions(tools: Tools | None) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the functions' arguments by name; an empty schema where a tool has none."""
    schemas = dict[str, Mapping[str, Any]]()
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            schemas[name] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def _types_of(key: str, parameters: Mapping[str, Any]) -> set[str]:
    """Return the types that an argument may have; empty if the schema has none or is invalid."""
    try:
        return _types(_resolved(parameters["properties"][key], parameters))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema, or the definition that its ``$ref`` refers to."""
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    definition = (whole.get(place) or {}).get(name) if name else None
    return definition if isinstance(definition, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if it has none."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for part in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        types |= (_types(part) or {"string"}) if isinstance(part, Mapping) else set()
    texts = any(isinstance(value, str) for value in schema.get("enum", ()))
    return types or ({"string"} if texts or "const" in schema else set())


def _typed(text: str, types: set[str]) -> Any:
    """Return the value of an argument that is written without quotes: JSON, unless it may be a text."""
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    with contextlib.suppress(ValueError, RecursionError):
        return STRICT.decode(text.strip())
    return text  # the validation of the arguments reports the error


def _bare(text: str, parts: Parts, tools: Tools | None) -> str:
    """Add the calls without marks to ``parts``: a reply is JSON, ends in JSON after a mark, or has calls of declared
    tools on separate lines. Returns the rest of the text."""
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
            at = _skip(_BETWEEN, body, at)
        if mark or (calls and all(map(_is_call, calls))):
            parts.add(calls)
            return text[: mark.start()].strip() if mark else ""
    except (ValueError, RecursionError) as problem:
        rest = text if mark else _on_own_lines(text, parts, tools)
        if not parts.calls and (mark or _LIKE_A_CALL.match(body)):
            parts.errors.append(why(problem))
        return rest
    return text


def _on_own_lines(text: str, parts: Parts, tools: Tools | None) -> str:
    """Add the calls of declared tools on separate lines to ``parts``. Returns the rest of the text."""
    names = _functions(tools).keys()
    kept, at = list[str](), 0
    for _, start in zip(range(_TRIES if names else 0), _OWN_LINE.finditer(text), strict=False):
        if start.start() < at:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            value, end = STRICT.raw_decode(text, start.end())
            calls = value if isinstance(value, list) else [value]
            alone = not text[end:].lstrip(" \t;,").strip("\r")[:1].strip()
            if alone and calls and all(_is_call(call) and _function(call)["name"] in names for call in calls):
                parts.add(calls)
                kept, at = [*kept, text[at : start.start()]], end
    return _FENCE.sub("", "".join([*kept, text[at:]])).strip() if parts.calls else text


def _function(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, dict) else None


def _is_call(value: Any) -> bool:
    """Return whether a JSON value has the form of a call. Other JSON may be the answer."""
    function = _function(value)
    return isinstance(function, dict) and "name" in function and bool({"arguments", "parameters"} & function.keys())


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
