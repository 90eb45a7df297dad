"""The tools of one episode: answers the calls of a reply, several at once, each within its limits.

What the model does wrong (an unknown tool, wrong arguments) and what a tool raises is told to the model as text and
counted. A broken connection, and our own errors, are raised: infrastructure is never the model's fault.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from whet.base.errors import ConfigError, WhetError
from whet.chat.control_tokens import NO_TEXT
from whet.config import Config
from whet.config.nearest import did_you_mean
from whet.core.types import Message, ToolCall
from whet.processes.loop_thread import UserCodeExit
from whet.tools.tool import Tool, ToolError, bounded

COUNTS = ("calls", "errors", "unknown", "timeouts", "refused")


class ToolLimits(Config):
    """What calls of tools may cost."""

    max_calls: int = Field(default=16, ge=0)
    """Calls in one episode; those beyond are not run, and the model is told."""
    max_malformed: int = Field(default=1, ge=0)
    """Replies with calls that can't be read, which the model is told; one more ends the episode without a reward."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest time of one call, in seconds."""
    at_once: int = Field(default=8, ge=1)
    """Calls of one reply that run at the same time. Those of an object that keeps state run one after the other."""
    max_result_chars: int = Field(default=4000, ge=1)
    """Longer results are cut off, with a mark that says so."""


class Toolbox:
    """Tools by name."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits) -> None:
        self._tools, self._limits = {tool.name: tool for tool in tools}, limits
        self._late: str | None = None  # a tool that keeps state and may still be running
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        if len(self._tools) < len(tools):
            twice = next(name for name, number in Counter(tool.name for tool in tools).items() if number > 1)
            raise ConfigError(f"two tools are called {twice}; rename one of them")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """All tools, as chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of one reply. Return a message of the role ``tool`` for each, in their order."""
        allowed = max(0, self._limits.max_calls - self.counts["calls"])
        places = asyncio.Semaphore(self._limits.at_once)
        kept_in_order = asyncio.Lock()  # is fair: first come, first served

        async def one(number: int, call: ToolCall) -> Message:
            name, arguments = NO_TEXT.sub("\ufffd", call["function"]["name"][:64]), call["function"]["arguments"]
            if number >= allowed:
                self.counts["refused"] += 1
                text = f"Error: not run, for only {self._limits.max_calls} calls are allowed"
            else:
                self.counts["calls"] += 1
                tool = self._tools.get(name)
                async with kept_in_order if tool and tool.ordered else places:
                    text = await self._run(tool, name, arguments)
            return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}

        answers = await asyncio.gather(*map(one, range(len(calls)), calls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _run(self, tool: Tool | None, name: str, arguments: dict[str, Any]) -> str:
        try:
            if tool is None:
                self.counts["unknown"] += 1
                known = ", ".join(self._tools)
                raise ToolError(f"there is no tool {name!r}.{did_you_mean(name, self._tools)} Tools: {known}")
            return NO_TEXT.sub("\ufffd", await self._in_time(tool, arguments))
        except Exception as error:
            if not isinstance(error, ToolError) and is_infrastructure(error):
                raise
            self.counts["errors"] += 1
            text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            return NO_TEXT.sub("\ufffd", f"Error: {bounded(text, self._limits.max_result_chars)}")

    async def _in_time(self, tool: Tool, arguments: dict[str, Any]) -> str:
        if tool.ordered and self._late is not None:
            raise ToolError(f"not run, for {self._late} has not finished")
        running = asyncio.ensure_future(tool.run(arguments, self._limits.max_result_chars))
        try:
            done, _ = await asyncio.wait({running}, timeout=self._limits.deadline_s)
        finally:
            running.cancel()  # nothing, where it is done; code that does not listen is left behind
        if not done:
            if tool.alive is not None:
                await tool.alive()
            self.counts["timeouts"] += 1
            self._late = tool.name if tool.ordered else self._late
            raise ToolError(f"{tool.name} did not finish within {self._limits.deadline_s:g} s")
        return running.result()


def is_infrastructure(error: BaseException) -> bool:
    """Return whether an exception, or what caused it, is a lost connection, an HTTP status 429 or 5xx (of urllib,
    requests, httpx or openai), or an error of our own."""
    causes: list[object] = [error]
    for cause in causes:  # grows: what caused a cause is among them
        if isinstance(cause, ConnectionError | WhetError | UserCodeExit):
            return True
        for holder in (cause, getattr(cause, "response", None)):
            status = getattr(holder, "status_code", getattr(holder, "code", None))
            if isinstance(status, int) and (status == 429 or 500 <= status < 600):
                return True
        if isinstance(cause, BaseException):
            found = (getattr(cause, "reason", None), cause.__cause__, cause.__context__)
            causes += [one for one in found if one is not None and not any(one is other for other in causes)]
    return False
