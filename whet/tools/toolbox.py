"""The tools of one episode: they answer the calls of a reply, in parallel and within limits.

Errors of the model (an unknown tool, wrong arguments) and of a tool are counted and shown to the model as text. A
broken connection and whet's own errors are raised as infrastructure failures.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from whet.base.errors import ConfigError, DataError, WhetError
from whet.chat.control_tokens import NO_TEXT
from whet.config import Config
from whet.config.issues import did_you_mean
from whet.core.content import Content, Part
from whet.core.types import Message, ToolCall
from whet.fetch.images import read_image
from whet.processes.loop_thread import UserCodeExit
from whet.tools.tool import Tool, ToolError, bounded

COUNTS = ("calls", "errors", "unknown", "timeouts", "refused")


class ToolLimits(Config):
    """Limits of tool calls."""

    max_calls: int = Field(default=16, ge=0)
    """Most calls in one episode. Further calls are not run, and get an error as their result."""
    max_malformed: int = Field(default=1, ge=0)
    """Most replies with calls that can't be parsed. Their error is shown to the model; one more such reply ends the
    episode without a reward."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest time of one call, in seconds."""
    at_once: int = Field(default=8, ge=1)
    """Calls of one reply that run in parallel. Calls of an object that keeps state run one after the other."""
    max_result_chars: int = Field(default=4000, ge=1)
    """Most characters of a result. A longer result is cut, with a mark at its end."""


class Toolbox:
    """The tools of one episode by name, and counts of their calls."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits) -> None:
        self._tools, self._limits = {tool.name: tool for tool in tools}, limits
        self._late: str | None = None  # a tool that keeps state and may still be running
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        if len(self._tools) < len(tools):
            duplicate = next(name for name, number in Counter(tool.name for tool in tools).items() if number > 1)
            raise ConfigError(f"two tools are called {duplicate}; rename one of them")

    @property
    def schemas(self) -> list[dict[str, object]]:
        """Return the JSON schemas of all tools, for chat templates."""
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of one reply. Returns a message of the role ``tool`` for each, in their order."""
        allowed = max(0, self._limits.max_calls - self.counts["calls"])
        slots = asyncio.Semaphore(self._limits.at_once)
        ordered = asyncio.Lock()  # acquired in the order of the calls

        async def result(number: int, call: ToolCall) -> Message:
            name, arguments = NO_TEXT.sub("\ufffd", call["function"]["name"][:64]), call["function"]["arguments"]
            content: Content
            if number >= allowed:
                self.counts["refused"] += 1
                content = f"Error: not run, because only {self._limits.max_calls} calls are allowed"
            else:
                self.counts["calls"] += 1
                tool = self._tools.get(name)
                async with ordered if tool and tool.ordered else slots:
                    content = await self._run(tool, name, arguments)
            return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": content}

        results = await asyncio.gather(*map(result, range(len(calls)), calls), return_exceptions=True)
        for message in results:
            if isinstance(message, BaseException):
                raise message
        return [message for message in results if not isinstance(message, BaseException)]

    async def _run(self, tool: Tool | None, name: str, arguments: dict[str, object]) -> Content:
        try:
            if tool is None:
                self.counts["unknown"] += 1
                names = ", ".join(self._tools)
                raise ToolError(f"there is no tool {name!r}.{did_you_mean(name, self._tools)} Tools: {names}")
            return _readable(await self._in_time(tool, arguments))
        except Exception as error:
            if not isinstance(error, ToolError) and is_infrastructure(error):
                raise
            self.counts["errors"] += 1
            text = str(error) if isinstance(error, ToolError) else _named(error)
            return NO_TEXT.sub("\ufffd", f"Error: {bounded(text, self._limits.max_result_chars)}")

    async def _in_time(self, tool: Tool, arguments: dict[str, object]) -> Content:
        if tool.ordered and self._late is not None:
            raise ToolError(f"not run, because {self._late} has not finished")
        running = asyncio.ensure_future(tool.run(arguments, self._limits.max_result_chars))
        try:
            done, _ = await asyncio.wait({running}, timeout=self._limits.deadline_s)
        finally:
            running.cancel()  # does nothing after the end; code that ignores it is abandoned
        if not done:
            if tool.alive is not None:
                await tool.alive()
            self.counts["timeouts"] += 1
            self._late = tool.name if tool.ordered else self._late
            raise ToolError(f"{tool.name} did not finish within {self._limits.deadline_s:g} s")
        return running.result()


def _named(error: Exception) -> str:
    """Return an exception of a tool as text, also if its own code for that fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text can't be formatted)"


def _readable(content: Content) -> Content:
    """Return a result with texts in Unicode, and images as PNG or JPEG. Raises ``ToolError`` for an image that can't be
    read."""
    if isinstance(content, str):
        return NO_TEXT.sub("\ufffd", content)
    parts = list[Part]()
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": NO_TEXT.sub("\ufffd", part["text"])})
            continue
        try:
            parts.append({"type": "image", "url": read_image(part["url"])})
        except DataError as problem:
            raise ToolError(str(problem)) from None
    return parts


def is_infrastructure(error: BaseException) -> bool:
    """Return whether an exception or one of its causes is a lost connection, an HTTP status 429 or 5xx (of urllib,
    requests, httpx or openai), or an error of whet."""
    causes: list[object] = [error]
    for cause in causes:  # the list grows by the causes of each cause
        if isinstance(cause, ConnectionError | WhetError | UserCodeExit):
            return True
        for holder in (cause, getattr(cause, "response", None)):
            status = getattr(holder, "status_code", getattr(holder, "code", None))
            if isinstance(status, int) and (status == 429 or 500 <= status < 600):
                return True
        if isinstance(cause, BaseException):
            inner = (getattr(cause, "reason", None), cause.__cause__, cause.__context__)
            causes += [new for new in inner if new is not None and not any(new is other for other in causes)]
    return False
