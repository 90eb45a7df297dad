"""An MCP server for tests. Its argument names its fault."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")
wire = os.dup(1)  # the library keeps what is printed away from it
fault = sys.argv[1] if len(sys.argv) > 1 else ""


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="do.act")
async def act(kind: str) -> str:
    """Do something."""
    if kind == "die":
        os._exit(3)
    if kind == "freeze":
        time.sleep(60)
    if kind == "hang":
        import asyncio

        await asyncio.sleep(60)
    if kind == "error":
        raise ValueError("not so")
    if kind == "long":
        return "x" * 100_000
    if kind == "huge":
        for _ in range(1000):
            os.write(wire, b"y" * 1_000_000)
    if kind == "garbage":
        os.write(wire, b'<html>\n{"jsonrpc": "2.0", "id": 999, "result": {}}\n{"jsonrpc": "2.0", "id"\n\xff\n')
    return "done it"


if fault == "silent":
    time.sleep(60)
if fault == "ends":
    sys.exit(2)
if fault == "garbage":
    while True:
        print("what?", flush=True)
        time.sleep(0.01)
server.run()
