"""A server of the Model Context Protocol as a source of tools: a process with messages over its stdin and stdout.

The process starts with the first episode, serves all episodes, and is restarted after it has ended. A server that ends,
hangs or breaks the protocol is a lost connection, an infrastructure failure.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from whet.base.errors import CallError
from whet.base.extras import require
from whet.core.content import Content, Part
from whet.tools.source import ToolServer, ToolSource
from whet.tools.tool import Tool, ToolError, bounded, within

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams

_LONGEST = 16 * 2**20  # most bytes of one message


class MCPServer(ToolSource):
    """A command that starts a server, as in ``[uvx, mcp-server-time]``."""

    command: tuple[str, ...] = Field(min_length=1)
    environment: dict[str, str] = Field(default={})
    """Environment variables in addition to this process's."""
    answers_in_s: float = Field(default=30.0, gt=0)
    """Longest time in seconds to start, and to answer a check after a call's time-out."""

    def open(self) -> "MCPConnection":
        require("tools", "data.tools of type mcp", "mcp")
        return MCPConnection(self)


class MCPConnection(ToolServer):
    """The connection to the server, whose process is restarted after it has ended."""

    def __init__(self, settings: MCPServer) -> None:
        self.settings, self._lock, self._ended = settings, asyncio.Lock(), asyncio.Event()
        self._serving: asyncio.Task[None] | None = None  # opens and closes the client, which the same task must do
        self._tools: asyncio.Future[list[Tool]]

    async def tools(self) -> Sequence[Tool]:
        """Return the server's tools. Raises ``CallError`` if it doesn't start."""
        async with self._lock:
            if self._serving is None or self._serving.done() or self._ended.is_set():
                await self.close()
                self._ended = asyncio.Event()
                self._tools = asyncio.get_running_loop().create_future()
                self._tools.add_done_callback(
                    lambda future: future.cancelled() or future.exception()
                )  # if none awaits it
                self._serving = asyncio.create_task(self._serve(self._tools, self._ended))
        return await asyncio.shield(self._tools)

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    async def _serve(self, tools: "asyncio.Future[list[Tool]]", ended: asyncio.Event) -> None:
        from mcp import Client

        try:
            async with asyncio.timeout(self.settings.answers_in_s) as start, Client(self._process(ended)) as client:
                page = await client.list_tools()
                listed = [*page.tools]
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
                tools.set_result([self._tool(client, t.name, t.description, t.input_schema) for t in listed])
                start.reschedule(None)
                await ended.wait()
        except BaseException as error:
            reason = error
            while isinstance(reason, BaseExceptionGroup):
                reason = reason.exceptions[0]
            why = (
                f"no answer within {self.settings.answers_in_s:g} s"
                if isinstance(reason, TimeoutError)
                else repr(reason)
            )
            if not tools.done():
                tools.set_exception(CallError(f"the MCP server {self.settings.command} did not start: {why}"))
            if not isinstance(error, Exception):
                raise

    def _tool(self, client: "Client", name: str, description: str | None, parameters: dict[str, object]) -> Tool:
        valid = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
        run, alive = partial(self._call, client, name), partial(self._alive, client)
        return Tool(valid, description or valid, parameters, run, alive=alive)

    async def _call(self, client: "Client", name: str, arguments: dict[str, object], limit: int) -> Content:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise CallError(f"the MCP server {self.settings.command} has ended") from None
            raise ToolError(error.message) from None
        except ValidationError as error:  # of the answer; the model has no part in it
            raise CallError(f"the MCP server {self.settings.command} gave no result of {name}: {error}") from None
        if not result.content and result.structured_content is not None and not result.is_error:
            return bounded(result.structured_content, limit)
        if not result.is_error and any(part.type == "image" for part in result.content):
            return within([_part(part) for part in result.content], limit)
        texts = map(_text, result.content)
        if result.is_error:
            raise ToolError("\n".join(texts))
        return bounded(texts, limit)

    async def _alive(self, client: "Client") -> None:
        """Raise ``CallError``, and end the server, unless it answers."""
        try:
            async with asyncio.timeout(self.settings.answers_in_s):
                await client.list_tools(cache_mode="bypass")
        except Exception:
            self._ended.set()
            raise CallError(f"the MCP server {self.settings.command} does not answer") from None

    @contextlib.asynccontextmanager
    async def _process(self, ended: asyncio.Event) -> AsyncIterator["TransportStreams"]:
        """Run the server. Its messages have a limited length, and lines that are not messages are ignored."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        with _started(self.settings) as process:
            stdin, stdout, reading = await _streams(process)
            written, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)

            async def receive() -> None:
                async with written:
                    with contextlib.suppress(ValueError):  # a message that is too long
                        while line := await stdout.readline():
                            with contextlib.suppress(ValidationError):
                                await written.send(
                                    SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                                )
                ended.set()

            async def send() -> None:
                async with sent:
                    async for message in sent:
                        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                        stdin.write(f"{text}\n".encode())
                        with contextlib.suppress(ConnectionError):  # the process has ended, which receive() notices
                            await stdin.drain()

            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(receive)
                    tasks.start_soon(send)
                    yield incoming, outgoing
                    tasks.cancel_scope.cancel()
            finally:
                stdin.close()
                reading.close()


@contextlib.contextmanager
def _started(settings: MCPServer) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the server, and kill it with its children at the end. A process of asyncio's that is cancelled while it
    starts may never end."""
    process = subprocess.Popen(
        settings.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | settings.environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _streams(
    process: "subprocess.Popen[bytes]",
) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.ReadTransport]:
    """Return the standard input and output of a process as streams of the running loop, and what closes the output."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=_LONGEST)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, process.stdin)
    return asyncio.StreamWriter(transport, flow, None, loop), reader, reading


def _part(part: Any) -> Part:
    """Return a part of a server's result. The environment checks its images."""
    if part.type == "image":
        return {"type": "image", "url": f"data:{part.mime_type};base64,{part.data}"}
    return {"type": "text", "text": _text(part)}


def _text(part: Any) -> str:
    """Return a part as the model reads it: the text, or the description of anything else without its bytes."""
    if part.type == "text":
        return str(part.text)
    return str(part.model_dump_json(exclude={"data": True, "resource": {"blob": True}}, exclude_none=True))
