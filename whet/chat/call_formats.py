"""The formats of tool calls by families of models. A model's format is detected by rendering a sample call with its
template, and verified by parsing the result. The notations are in ``notations/``.

json      <tool_call>{"name": ..., "arguments": {...}}</tool_call>       Hermes, Qwen; by other marks: Granite, Phi,
          {"name": ..., "parameters": {...}}                             Llama 3   MiniMax M1, Nemotron, InternLM
tags      <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>   Qwen3-Coder, Qwen 3.5,
keys      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>  GLM   Nemotron 3
named     [TOOL_CALLS]NAME[ARGS]{...}                                    Mistral
invoke    <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>
deepseek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
kimi      <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...} ...
gemma     <|tool_call>call:NAME{KEY:VALUE}<tool_call|>                   Gemma 4
python    <|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>          LFM2
llama4    <|python_start|><|python_end|>{"name": ..., "parameters": {...}}, or [NAME(KEY=VALUE)]

gpt-oss writes thoughts, texts and calls as messages: ``harmony.py``.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from whet.base.strict_json import STRICT, JsonObject
from whet.chat.calls import checked_call, why
from whet.chat.notations.gemma_calls import gemma_block
from whet.chat.notations.json_calls import deepseek_block, json_block, kimi_block, named_block, read_bare, read_llama4
from whet.chat.notations.parts import MOST, Block, Parts, Tools
from whet.chat.notations.python_calls import python_block
from whet.chat.notations.tag_calls import invoke_block, keys_block, tags_block

_ARGUMENTS = {"whetkey": "whetvalue", "whetlist": [1, {"whetdeep": True}], "whetcount": 2}
# Calls in a conversation that is rendered only to detect the template's format.
SAMPLES = [checked_call({"name": "whetname", "arguments": _ARGUMENTS | {"whetcount": 2 + i}}, i) for i in range(2)]
_TYPES = {"whetkey": "string", "whetlist": "array", "whetcount": "integer"}
SAMPLE_TOOL: JsonObject = {
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
# Beginnings of calls by other families, which are errors in the reply of a model with another format.
_FOREIGN = re.compile(
    r"<\|?tool_calls?\|?>|<TOOLCALL>|\[TOOL_CALLS\]|<function=\w|<\|python_tag\|>|\bfunctools\[|<\|action_start\|>"
    r"|<｜tool▁calls?▁begin｜>|<\|tool_calls?_(?:section_)?begin\|>|<minimax:tool_call>|<\|tool_call_start\|>"
    r"|\bto=functions\.\w"
)


Body = Literal["json", "tags", "keys", "named", "invoke", "deepseek", "kimi", "gemma", "python", "llama4"]
_BLOCKS: dict[str, Block] = {
    "json": json_block,
    "tags": tags_block,
    "keys": keys_block,
    "named": named_block,
    "invoke": invoke_block,
    "deepseek": deepseek_block,
    "kimi": kimi_block,
    "gemma": gemma_block,
    "python": python_block,
}
# The beginning of the first of ``SAMPLES`` in notations with fixed marks, and these marks.
_FIXED: tuple[tuple[Body, re.Pattern[str], str, str], ...] = (
    ("named", re.compile(r"\[TOOL_CALLS\]\s*whetname"), "[TOOL_CALLS]", ""),
    ("deepseek", re.compile("<｜tool▁sep｜>whetname|whetname<｜tool▁sep｜>"), "<｜tool▁calls▁begin｜>",
     "<｜tool▁calls▁end｜>"),
    ("kimi", re.compile(r"whetname:\d+\s*<\|tool_call_argument_begin"), "<|tool_calls_section_begin|>",
     "<|tool_calls_section_end|>"),
    ("gemma", re.compile(r"<\|tool_call>call:whetname"), "<|tool_call>", "<tool_call|>"),
    ("llama4", re.compile(r"<\|python_start\|>"), "", ""),
)  # fmt: skip
# The beginning of the first of ``SAMPLES`` in notations with any marks, and its end.
_MARKED: tuple[tuple[Body, str, str], ...] = (
    ("tags", "<function=whetname>", "</function>"),
    ("keys", "whetname", "</arg_value>"),
    ("invoke", '<invoke name="whetname">', "</invoke>"),
    ("python", "whetname(whetkey=", ")"),
)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The marks around the calls of a reply, and the notation of a call."""

    body: Body
    before: str = ""  # empty: calls have no mark
    after: str = ""

    def read(self, text: str, tools: Tools | None = None) -> Parts:
        """Return the parts of a reply. The schemas of ``tools`` determine the types of arguments."""
        parts = Parts()
        if self.body == "llama4":
            parts.text = read_llama4(text, parts, tools)
        elif self.body == "json" and not self.before:
            parts.text = read_bare(text, parts, tools)
        else:
            parts.text = self._marked(text, parts, tools)
        if len(parts.calls) > MOST:
            parts.calls = parts.calls[:MOST]
            parts.errors.append(f"only the first {MOST} calls of a reply are read")
        if tools and not (parts.calls or parts.errors) and (mark := _FOREIGN.search(parts.text)):
            parts.errors.append(f"it begins with {mark[0]}, and this model writes calls otherwise")
        return parts

    def _marked(self, text: str, parts: Parts, tools: Tools | None) -> str:
        """Add the calls between marks to ``parts``. Return the rest of the text. Strings of JSON may contain marks; the
        last closing mark may be missing after JSON."""
        begins = [re.escape(self.before)] * bool(self.before) + [r"(?=<function=)"] * (self.body == "tags")
        begin = re.compile("|".join(begins))
        kept, at = list[str](), 0
        while (start := begin.search(text, at)) and len(parts.calls) <= MOST and len(parts.errors) < MOST:
            kept.append(text[at : start.start()])
            try:
                value, at = _BLOCKS[self.body](text, start.end(), self.after, tools)
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
    for body, beginning, before, after in _FIXED:
        if beginning.search(written):
            yield CallFormat(body, before, after)
    for body, begin, end in _MARKED:
        start = written.find(begin)
        if start >= 0 and (body != "keys" or re.match(r"whetname\s*<arg_key>", written[start:])):
            before, after = written[:start].strip(), written.rpartition(end)[2].strip()
            if body == "python":
                before, after = before.removesuffix("[").strip(), after.removeprefix("]").strip()
            if before or body == "tags":
                yield CallFormat(body, before, after)
    for opening in re.finditer(r"[\[{]", written[: max(0, written.find("whetname"))]):
        with contextlib.suppress(ValueError):
            _, close = STRICT.raw_decode(written, opening.start())
            before, after = written[: opening.start()].strip(), written[close:].strip()
            yield CallFormat("json", before, after) if before else CallFormat("json")
