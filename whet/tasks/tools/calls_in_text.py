"""Detection of tool calls in any form: parsed calls, calls that can't be parsed, and text that a parser for another
model's format would read as a call. Thoughts don't count."""

import re
from collections.abc import Collection

from whet.chat.call_formats import CallFormat
from whet.chat.replies import ReplyFormat
from whet.core.content import text_of
from whet.core.types import Message

_TAGS = re.compile(
    r"<(?:\|?tool_?calls?|tool_code|function_?calls?|function=|invoke\b|search>|python>|code_interpreter|execute>)"
    r"|<\|(?:python_tag|tool|plugin|function)|\[TOOL_CALLS?\]|<｜tool▁call"
    r"|```(?:tool_code|tool_call|tool_outputs?)\b|^Action:.*\n+Action Input:|\bto=functions\.",
    re.IGNORECASE | re.MULTILINE,
)
# Names of common tools. A line that is only a call of one counts; code in a fence is part of an answer.
_TOOLS = (
    r"python|run_python|execute_?\w*|run_code|code_interpreter|calculat(?:e|or)|calc"
    r"|wolfram\w*|browser?|fetch|\w*search"
)
_LINE = r"^[^\S\n]*\[?(?:print\()?(?:\w+\.){{0,4}}(?:{names})\([^\n]{{0,2000}}\)\]?[^\S\n]*$"
_NAMED = re.compile(
    r"\[?[A-Za-z_][\w.]{0,80}\(\s*[A-Za-z_]\w{0,80}\s*=[^\n]{0,2000}\)\]?"
)  # name(key=value), and no more
_BARE = ReplyFormat(CallFormat("json"))
_MOST = 20_000  # characters of a reply that are searched


def invokes_tool(reply: Message, declared: Collection[str] = ()) -> bool:
    """Return whether the reply calls a tool. ``declared``: names of tools whose calls in plain text count, too.

    >>> invokes_tool({"role": "assistant", "content": 'search("weather in Oslo")'})
    True
    >>> invokes_tool({"role": "assistant", "content": "I can't search the web."})
    False
    """
    return bool(reply.get("tool_calls") or reply.get("malformed_calls")) or _in_text(
        text_of(reply["content"]), declared
    )


def _in_text(content: str, declared: Collection[str]) -> bool:
    text = content[:_MOST]
    parsed = _BARE.parse(text)
    if _TAGS.search(text) or "tool_calls" in parsed or "malformed_calls" in parsed or _NAMED.fullmatch(text.strip()):
        return True
    names = "|".join([_TOOLS, *(re.escape(name.rpartition(".")[2]) for name in declared)])
    prose = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    return re.search(_LINE.format(names=names), prose, re.IGNORECASE | re.MULTILINE) is not None
