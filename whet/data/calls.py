"""A reply in its parts: the thought, the text, and the calls of tools.

Calls come in the nested form of the OpenAI API, arguments as an object. What looks like a call and is none stays in
the text, and ``malformed_calls`` says why. No text, however odd, raises. Knows no tokens.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from whet.data.jsonl import STRICT
from whet.data.tools_as_text import CALL, CALLED, THINK, THOUGHT
from whet.errors import ConfigError
from whet.types import Message, ToolCall

CallFormat = Literal["none", "hermes", "llama3", "json"]
# Stands in a conversation that is rendered only to see how the template writes a call.
SAMPLE: ToolCall = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "whetname", "arguments": {"whetkey": "whetvalue"}},
}
_MOST = 128  # calls of a reply; those beyond are ignored
_LONGEST, _BLANK = 400_000, re.compile(r"\s{1000}")  # seconds of somebody's regular expressions, at the worst
_MARK = re.compile(r"<\|python_tag\|>|\[TOOL_CALLS\]")  # before bare JSON, in Llama 3 and Mistral
_LIKE_A_CALL = re.compile(r'[\s\[{]*"name"\s*:')
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*<function=([^>\s]+)>")  # Qwen3-Coder writes tags instead of JSON
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes replies."""

    calls: CallFormat = "none"
    thinks: bool = False  # between <think> and </think>
    opened: bool = False  # the prompt has written the <think>

    def parse(self, text: str) -> Message:
        """Return the message that a text spells. Never raises."""
        thought, said = self._split(text) if self.thinks else (None, text)
        calls, wrong = list[ToolCall](), list[str]()
        if self.calls == "hermes" and CALL in said:
            said = _tagged(said, calls, wrong)
        elif self.calls in ("llama3", "json"):
            said = _bare(said, calls, wrong)
        reply: Message = {"role": "assistant", "content": said}
        if thought is not None:
            reply["reasoning_content"] = thought
        if calls:
            reply["tool_calls"] = calls
        if wrong:
            reply["malformed_calls"] = wrong
        return reply

    def _split(self, text: str) -> tuple[str | None, str]:
        """The thought, if there is one, and the rest. A thought that has no end is all there is."""
        begun = text.lstrip().startswith(THINK)
        if not (begun or self.opened):
            return None, text
        thought, _, said = (text.lstrip().removeprefix(THINK) if begun else text).partition(THOUGHT)
        return thought.strip("\n"), said.lstrip("\n")


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """How a model writes replies, as its tokenizer says (``response_template`` of transformers). Raises ``ConfigError``
    for one that transformers doesn't take."""

    template: dict[str, Any]
    prompt: str  # ends where a reply begins

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing import parse_response

        try:
            parse_response("", self.template, prefix=self.prompt)
        except (ValueError, TypeError) as problem:
            raise ConfigError(f"the tokenizer's response_template can't be used: {problem}") from None

    def parse(self, text: str) -> Message:
        """Return the message that a text spells. Never raises."""
        from transformers.utils.chat_parsing import parse_response

        try:
            if len(text) > _LONGEST or _BLANK.search(text):
                raise ValueError("it stands in a reply that is too long, or has too many blanks in a row, to be read")
            found = parse_response(text, self.template, prefix=self.prompt)
            calls = [checked_call(call, number) for number, call in enumerate(found.get("tool_calls") or [])][:_MOST]
        except Exception as problem:  # whatever a text does to somebody's regular expressions
            return {"role": "assistant", "content": text, "malformed_calls": [_why(problem)]}
        reply: Message = {"role": "assistant", "content": str(found.get("content", ""))}
        if thought := found.get("thinking") or found.get("reasoning_content"):
            reply["reasoning_content"] = str(thought)
        if calls:
            reply["tool_calls"] = calls
        return reply


def format_of(written: str) -> CallFormat:
    """The format of ``SAMPLE`` as a chat template has written it."""
    if "whetname" not in written or "whetvalue" not in written:
        return "none"
    if CALL in written:
        return "hermes"
    return "llama3" if '"parameters"' in written else "json" if '"arguments"' in written else "none"


def checked_call(found: Any, number: int) -> ToolCall:
    """A call from what a model wrote: a name with ``arguments`` (or ``parameters``), nested or not. Raises
    ``ValueError`` for anything else."""
    function = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("it is not an object with a name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = STRICT.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are not an object")
    json.dumps([function["name"], arguments], ensure_ascii=False).encode()  # not half of a surrogate pair
    return {
        "id": f"call{number:05}",  # nine letters and digits, as some templates ask for
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tagged(text: str, calls: list[ToolCall], wrong: list[str]) -> str:
    """Take calls out of their tags. Return the rest."""
    kept, at = [], 0
    while (start := text.find(CALL, at)) >= 0 and len(calls) + len(wrong) < _MOST:
        kept.append(text[at:start])
        try:
            found, at = _read(text, start + len(CALL))
            calls.append(checked_call(found, len(calls)))
        except (ValueError, RecursionError) as problem:
            wrong.append(_why(problem))
            _, at = _closing(text, start)
            kept.append(text[start:at])
    return "".join([*kept, text[at:]]).strip()


def _read(text: str, at: int) -> tuple[Any, int]:
    """What is called, and where it ends. JSON is read as far as it goes, so that its strings may hold tags. The last
    closing tag may be missing."""
    if named := _NAMED.match(text, at):
        closing, end = _closing(text, at)
        body, at, arguments = text[named.end() : closing], 0, dict[str, str]()
        while one := _PARAMETER.match(body, at):
            arguments[one[1]], at = one[2], one.end()
        if body[at:].strip() not in ("", "</function>"):
            raise ValueError("its parameters are not in tags that end")
        return {"name": named[1], "arguments": arguments}, end
    found, at = STRICT.raw_decode(text, _skip(_SPACE, text, at))
    at = _skip(_SPACE, text, at)
    if at < len(text) and not text.startswith(CALLED, at):
        raise ValueError("something stands behind the JSON")
    return found, min(len(text), at + len(CALLED))


def _closing(text: str, at: int) -> tuple[int, int]:
    """Where the next closing tag begins and ends."""
    closing = text.find(CALLED, at)
    return (closing, closing + len(CALLED)) if closing >= 0 else (len(text), len(text))


def _bare(text: str, calls: list[ToolCall], wrong: list[str]) -> str:
    """Take calls out of a reply that is nothing but JSON, or ends so after a mark. Return the rest."""
    mark = None if text.lstrip().startswith(("{", "[{")) else _MARK.search(text)
    body = (text[mark.end() :] if mark else text).strip().removesuffix("<|eom_id|>")
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    if not mark and not body.startswith(("{", "[")):
        return text
    found, at = list[Any](), 0
    try:
        while at < len(body):
            one, at = STRICT.raw_decode(body, at)
            found += one if isinstance(one, list) else [one]
            at = _skip(_BETWEEN, body, at)
        if mark or (found and all(map(_is_call, found))):
            calls += [checked_call(one, number) for number, one in enumerate(found[:_MOST])]
            return text[: mark.start()].strip() if mark else ""
    except (ValueError, RecursionError) as problem:
        if mark or _LIKE_A_CALL.match(body):
            wrong.append(_why(problem))
    return text


def _is_call(found: Any) -> bool:
    """JSON may be the answer itself, so a call has to look like one."""
    function = found.get("function", found) if isinstance(found, dict) else None
    return isinstance(function, dict) and "name" in function and bool({"arguments", "parameters"} & function.keys())


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _why(problem: Exception) -> str:
    if isinstance(problem, json.JSONDecodeError):
        return f"it is not valid JSON: {problem.msg}"
    if isinstance(problem, UnicodeEncodeError):
        return "it holds half of a surrogate pair"
    return "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:200]
