"""How families of models write calls of tools: found by rendering a call that is known, and proven by reading it back.

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
# Stand in a conversation that is rendered only to see how the template writes calls.
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
MOST = 128  # calls of a reply
_MARK = re.compile(r"<\|python_tag\|>|\[TOOL_CALLS\]")  # before bare JSON
_OWN_LINE = re.compile(r"^[ \t]*(?=[\[{])", re.MULTILINE)
_TRIES = 32  # lines of a text that may begin with a call
_LIKE_A_CALL = re.compile(r'[\s\[{]*"name"\s*:')
_FENCE = re.compile(r"```(?:json)?\s*```")
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;,]*")
_FUNCTION = re.compile(r"<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYS_NAME = re.compile(r"\s*([\w.-]+)")
_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?={)")
_WORDS = {"True": True, "False": False, "None": None}  # as templates write what is no text
# How other families begin a call. In a reply of a model that writes calls otherwise it is a mistake, and no answer.
_FOREIGN = re.compile(
    r"<\|?tool_calls?\|?>|<TOOLCALL>|\[TOOL_CALLS\]|<function=\w|<\|python_tag\|>|\bfunctools\[|<\|action_start\|>"
    r"|<｜tool▁calls?▁begin｜>|<\|tool_calls?_(?:section_)?begin\|>|<minimax:tool_call>|<\|tool_call_start\|>"
)


@dataclass(slots=True)
class Found:
    """The parts of a reply."""

    said: str = ""  # what is left of the text
    calls: list[ToolCall] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # why parts that look like calls can't be read as such

    def add(self, read: Any) -> None:
        """Take what was read as calls. Raises ``ValueError``, and then takes none."""
        new = read if isinstance(read, list) else [read]
        self.calls += [checked_call(one, len(self.calls) + number) for number, one in enumerate(new)]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """What stands around the calls of a reply, and how one is written."""

    body: Literal["json", "tags", "keys", "named"]
    before: str = ""  # empty: a call is known by itself
    after: str = ""

    def read(self, text: str, tools: Tools | None = None) -> Found:
        """Take a reply apart. ``tools`` that are known give the types of arguments."""
        found = Found()
        found.said = _bare(text, found, tools) if self.body == "json" and not self.before else ""
        if self.before or self.body != "json":
            found.said = self._marked(text, found, tools)
        if len(found.calls) > MOST:
            found.calls = found.calls[:MOST]
            found.wrong.append(f"only the first {MOST} calls of a reply are read")
        if tools and not (found.calls or found.wrong) and (mark := _FOREIGN.search(found.said)):
            found.wrong.append(f"it begins with {mark[0]}, and this model writes calls otherwise")
        return found

    def _marked(self, text: str, found: Found, tools: Tools | None) -> str:
        """Take calls out of their marks. Return the rest."""
        begins = [re.escape(self.before)] * bool(self.before) + [r"(?=<function=)"] * (self.body == "tags")
        begin = re.compile("|".join(begins))
        kept, at = list[str](), 0
        while (start := begin.search(text, at)) and len(found.calls) <= MOST and len(found.wrong) < MOST:
            kept.append(text[at : start.start()])
            try:
                read, at = self._block(text, start.end(), tools)
                found.add(read)
            except (ValueError, RecursionError) as problem:
                found.wrong.append(why(problem))
                at = self._end(text, max(start.end(), start.start() + 1), begin)
                kept.append(text[start.start() : at])
        return "".join([*kept, text[at:]]).strip() if kept else text

    def _end(self, text: str, at: int, begin: re.Pattern[str]) -> int:
        """Where a block that can't be read ends: after its closing mark, or before the next one begins."""
        if self.after:
            closing = text.find(self.after, at)
            return closing + len(self.after) if closing >= 0 else len(text)
        following = begin.search(text, at)
        return following.start() if following else len(text)

    def _block(self, text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
        """What is called between two marks, and where it ends. JSON is read as far as it goes, so that its strings may
        hold marks. The last closing mark may be missing."""
        if self.body == "tags":
            return self._with_tags(text, at, tools)
        if self.body == "keys":
            read, at = _with_keys(text, at, tools)
        elif self.body == "named":
            read, at = _with_name(text, at)
        else:
            read, at = STRICT.raw_decode(text, _skip(_SPACE, text, at))
            while self.after and text[(at := _skip(_BETWEEN, text, at)) :][:1] in ("{", "["):
                more, at = STRICT.raw_decode(text, at)
                read = [*(read if isinstance(read, list) else [read]), *(more if isinstance(more, list) else [more])]
        if not self.after:
            return read, at
        at = _skip(_SPACE, text, at)
        if at < len(text) and not text.startswith(self.after, at):
            raise ValueError("something stands behind the JSON" if self.body == "json" else "its end is not marked")
        return read, min(len(text), at + len(self.after))

    def _with_tags(self, text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
        named = _FUNCTION.match(text, _skip(_SPACE, text, at))
        if not named:
            raise ValueError("it is not a function in tags")
        read, at = _filled(named[1], _PARAMETER, "<parameter=", text, named.end(), tools)
        at = _skip(_SPACE, text, at)
        for end in ("</function>", self.after):
            if text.startswith(end, at):
                at += len(end)
                at = _skip(_SPACE, text, at) if text.startswith(self.after, _skip(_SPACE, text, at)) else at
            elif end == "</function>" and at < len(text) and not text.startswith(self.after or "</function>", at):
                raise ValueError("its parameters are not in tags that end")
        return read, at


def format_of(written: str) -> CallFormat | None:
    """The format in which a chat template has written the first of ``SAMPLES``; None for one that can't be read."""
    formats = (one for one in _candidates(written) if "whet" not in one.before + one.after)
    return next((one for one in formats if _same_calls(one.read(written, [SAMPLE_TOOL]), 1)), None)


def reads_back(format: CallFormat, written: str) -> bool:
    """Return whether all of ``SAMPLES`` are read from what a template has made of them, or it is noticed that they
    aren't."""
    found = format.read(written, [SAMPLE_TOOL])
    return bool(found.wrong) or _same_calls(found, len(SAMPLES))


def _same_calls(found: Found, number: int) -> bool:
    calls, wanted = ([call["function"] for call in calls] for calls in (found.calls, SAMPLES[:number]))
    return calls == wanted and not found.said and not found.wrong


def _candidates(written: str) -> Iterator[CallFormat]:
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
    return _filled(named[1], _KEY, "<arg_key>", text, named.end(), tools)


def _with_name(text: str, at: int) -> tuple[Any, int]:
    if not (named := _NAMED.match(text, at)):
        return STRICT.raw_decode(text, _skip(_SPACE, text, at))  # as earlier models of the family write them
    arguments, at = STRICT.raw_decode(text, named.end())
    return {"name": named[1], "arguments": arguments}, at


def _filled(name: str, one: re.Pattern[str], opening: str, text: str, at: int, tools: Tools | None) -> tuple[Any, int]:
    """A call whose arguments are written one by one, and where the last of them ends."""
    arguments, parameters = dict[str, Any](), _functions(tools).get(name, {})
    while argument := one.match(text, at):
        key, value = argument[1], argument[2]
        if opening in value or key in arguments:
            raise ValueError("an argument is there twice, or has no end")
        arguments[key], at = _typed(value, _types_of(key, parameters)), argument.end()
    return {"name": name, "arguments": arguments}, at


def _functions(tools: Tools | None) -> dict[str, Mapping[str, Any]]:
    """The functions of tools by their names, and the schemas of their arguments, as far as these are there."""
    found = dict[str, Mapping[str, Any]]()
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found


def _types_of(key: str, parameters: Mapping[str, Any]) -> set[str]:
    """The types that an argument may have; empty where a schema, which anybody may have written, doesn't say."""
    try:
        return _types(_resolved(parameters["properties"][key], parameters))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or what its ``$ref`` leads to among the definitions."""
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    found = (whole.get(place) or {}).get(name) if name else None
    return found if isinstance(found, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows; empty where it doesn't say."""
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    for part in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        types |= (_types(part) or {"string"}) if isinstance(part, Mapping) else set()
    texts = any(isinstance(one, str) for one in schema.get("enum", ()))
    return types or ({"string"} if texts or "const" in schema else set())


def _typed(text: str, types: set[str]) -> Any:
    """The value of an argument that is written without quotes: JSON, unless it may be a text."""
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    with contextlib.suppress(ValueError, RecursionError):
        return STRICT.decode(text.strip())
    return text  # the tool says what is wrong with it


def _bare(text: str, found: Found, tools: Tools | None) -> str:
    """Take calls out of a reply that is nothing but JSON, ends so after a mark, or has calls of known tools on lines by
    themselves. Return the rest."""
    mark = None if text.lstrip().startswith(("{", "[{")) else _MARK.search(text)
    body = (text[mark.end() :] if mark else text).strip().removesuffix("<|eom_id|>")
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    if not mark and not body.startswith(("{", "[")):
        return _on_own_lines(text, found, tools)
    read, at = list[Any](), 0
    try:
        while at < len(body):
            one, at = STRICT.raw_decode(body, at)
            read += one if isinstance(one, list) else [one]
            at = _skip(_BETWEEN, body, at)
        if mark or (read and all(map(_is_call, read))):
            found.add(read)
            return text[: mark.start()].strip() if mark else ""
    except (ValueError, RecursionError) as problem:
        rest = text if mark else _on_own_lines(text, found, tools)
        if not found.calls and (mark or _LIKE_A_CALL.match(body)):
            found.wrong.append(why(problem))
        return rest
    return text


def _on_own_lines(text: str, found: Found, tools: Tools | None) -> str:
    known = _functions(tools)
    kept, at = list[str](), 0
    for _, start in zip(range(_TRIES if known else 0), _OWN_LINE.finditer(text), strict=False):
        if start.start() < at:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            read, end = STRICT.raw_decode(text, start.end())
            calls = read if isinstance(read, list) else [read]
            alone = not text[end:].lstrip(" \t;,").strip("\r")[:1].strip()
            if alone and calls and all(_is_call(one) and one.get("function", one)["name"] in known for one in calls):
                found.add(calls)
                kept, at = [*kept, text[at : start.start()]], end
    return _FENCE.sub("", "".join([*kept, text[at:]])).strip() if found.calls else text


def _is_call(found: Any) -> bool:
    """JSON may be the answer itself, so a call has to look like one."""
    function = found.get("function", found) if isinstance(found, dict) else None
    return isinstance(function, dict) and "name" in function and bool({"arguments", "parameters"} & function.keys())


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
