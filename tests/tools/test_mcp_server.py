"""A server of the Model Context Protocol serves tools; its failures are never counted as the model's errors."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contracts.fault_contract import eventually
from whet.base.errors import CallError
from whet.core.types import ToolCall
from whet.tools.mcp_server import MCPConnection, MCPServer
from whet.tools.tool import Tool
from whet.tools.toolbox import Toolbox, ToolLimits

pytest.importorskip("mcp")


def server(fault: str = "", answers_in_s: float = 100.0) -> MCPServer:
    command = (sys.executable, str(Path(__file__).with_name("server.py")), fault)
    return MCPServer(command=command, answers_in_s=answers_in_s)


def run(use: Callable[[MCPConnection], Awaitable[None]], settings: MCPServer) -> None:
    async def opened() -> None:
        connection = settings.open()
        try:
            await use(connection)
        finally:
            await connection.close()
        assert not [child for child in psutil.Process().children() if runs(child, "server.py")]

    asyncio.run(opened())


def runs(process: psutil.Process, word: str) -> bool:
    try:
        return word in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # has ended; ZombieProcess is one of these
        return False


async def answer(tools: Sequence[Tool], name: str, deadline_s: float = 100.0, **arguments: Any) -> str:
    call: ToolCall = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    box = Toolbox(tools, ToolLimits(deadline_s=deadline_s, max_result_chars=100))
    return (await box.answer([call]))[0]["content"]


def test_a_servers_tools_are_called_and_its_errors_are_shown() -> None:
    async def use(connection: MCPConnection) -> None:
        tools = await connection.tools()
        assert [(tool.name, tool.description) for tool in tools] == [
            ("add", "Add two numbers."),
            ("do_act", "Do something."),
        ]
        assert tools[0].parameters["required"] == ["a", "b"]
        assert await answer(tools, "add", a=2, b=3) == "5"
        assert (await answer(tools, "add", a="x", b=3)).startswith("Error: ")
        assert (await answer(tools, "do_act", kind="error")).startswith("Error: Error executing tool")
        assert await answer(tools, "do_act", kind="long") == "x" * 100 + "\n[the rest is left out]"
        assert await answer(tools, "do_act", kind="garbage") == "done it"  # a wrong id, HTML, half a message
        assert await answer(tools, "do_act", kind="hang", deadline_s=0.3) == "Error: do_act did not finish within 0.3 s"
        assert await answer(tools, "add", a=2, b=3) == "5"
        assert await connection.tools() is tools

    run(use, server())


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"content": "5"}, None),  # not a list of parts
        ({"content": [], "structuredContent": {"sum": 5}}, '{"sum": 5}'),
        ({"content": [{"type": "text", "text": "five"}], "structuredContent": {"sum": 5}}, "five"),
        (
            {"content": [{"type": "audio", "data": "eHh4", "mimeType": "audio/wav"}]},
            '{"type":"audio","mime_type":"audio/wav"}',
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "eHh4"}}]},
            '{"type":"resource","resource":{"uri":"file:///a"}}',
        ),
    ],
)
def test_a_broken_result_is_the_servers_fault_and_one_without_a_text_is_json(values: Any, shown: str | None) -> None:
    from mcp.types import CallToolResult

    class Answering:
        async def call_tool(self, name: str, arguments: Any) -> CallToolResult:
            return CallToolResult.model_validate(values)

    called = MCPConnection(server())._call(Answering(), "add", {}, 100)  # type: ignore[arg-type]
    if shown is None:
        with pytest.raises(CallError, match="gave no result of add: 1 validation error"):
            asyncio.run(called)  # type: ignore[arg-type]
    else:
        assert asyncio.run(called) == shown  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["die", "huge", pytest.param("freeze", marks=pytest.mark.slow)])
def test_a_server_that_dies_freezes_or_floods_is_raised_and_started_again(kind: str) -> None:
    async def use(connection: MCPConnection) -> None:
        tools = await connection.tools()
        settings = connection.settings
        if kind == "freeze":
            connection.settings = settings.model_copy(update={"answers_in_s": 1.0})
        with pytest.raises(CallError):
            await answer(tools, "do_act", kind=kind, deadline_s=0.5 if kind == "freeze" else 100.0)
        connection.settings = settings
        again = await connection.tools()
        assert await answer(again, "add", a=2, b=3) == "5"

    before = psutil.Process().memory_info().rss
    run(use, server())
    assert psutil.Process().memory_info().rss - before < 2**29


@pytest.mark.parametrize(
    ("fault", "why"), [("silent", "no answer within 1 s"), ("ends", "did not start"), ("garbage", "no answer")]
)
def test_a_server_that_does_not_start_is_named_with_its_reason(fault: str, why: str) -> None:
    async def use(connection: MCPConnection) -> None:
        with pytest.raises(CallError, match=why):
            await connection.tools()

    run(use, server(fault, answers_in_s=1.0 if fault != "ends" else 100.0))


@pytest.mark.timeout(100)
def test_a_run_may_end_while_a_server_starts(caplog: pytest.LogCaptureFixture) -> None:
    async def start_and_end(milliseconds: int) -> None:
        command = (sys.executable, "-c", "import time; time.sleep(600)", "a server starts")
        connection = MCPServer(command=command).open()
        starting = asyncio.create_task(connection.tools())
        await asyncio.sleep(milliseconds / 1000)
        starting.cancel()

    for milliseconds in range(10):
        asyncio.run(start_and_end(milliseconds))
    gc.collect()
    assert not caplog.records
    started = psutil.Process().children(recursive=True)
    assert eventually(lambda: not any(runs(process, "a server starts") for process in started))


def test_a_command_that_is_not_there_is_named() -> None:
    async def use(connection: MCPConnection) -> None:
        with pytest.raises(CallError, match="no-such-command"):
            await connection.tools()

    run(use, MCPServer(command=("no-such-command",)))
