"""200 hostile clients at once, while an episode calls the model: it is recorded as if it were alone, and nothing that
the clients hold remains."""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.endpoint.agents import Scene, Streaming, scene
from tests.endpoint.test_api import user
from whet.endpoint.config import EndpointConfig

CLIENTS = 200
_STAY = 5.0  # seconds after which a client goes away
JSON = json.dumps({"model": "m", "messages": [user("hi")], "stream": True}).encode()

Client = Callable[[Scene, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def head(token: str, length: int | str, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n{more}\r\n"
    ).encode()


async def slow_sender(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for letter in head("stolen", 10):
        writer.write(bytes([letter]))
        await asyncio.sleep(0.05)


async def half_a_request(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head("stolen", 100)[:40])
    await reader.read()


async def wrong_tokens(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(20):
        writer.write(head("stolen", len(JSON)) + JSON)
        await reader.readuntil(b"\r\n\r\n")


async def a_flood(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(50):  # pipelined, without reading an answer
        writer.write(head("stolen", len(JSON)) + JSON)
    await writer.drain()
    await reader.read(100)


async def a_huge_body(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head("stolen", 2**40))
    for _ in range(64):
        writer.write(b" " * 2**16)
        await writer.drain()


async def endless_headers(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head("stolen", 2)[:-2])
    for number in range(2000):
        writer.write(f"x-{number}: {'y' * 100}\r\n".encode())
        await writer.drain()


async def not_http(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(random.Random(0).randbytes(5000))
    await reader.read()


async def a_bad_length(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head("stolen", "-5") + JSON)
    await reader.read()


async def both_lengths(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(at.address.api_key, len(JSON), more="transfer-encoding: chunked\r\n") + JSON)
    await reader.read(100)


async def leaves_its_stream(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A client with the token, which goes away in the middle of its answer."""
    writer.write(head(at.address.api_key, len(JSON)) + JSON)
    await reader.readuntil(b"data: ")
    writer.transport.abort()


async def leaves_its_body(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(at.address.api_key, 1000) + JSON)
    await writer.drain()
    writer.transport.abort()


async def never_reads(at: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(at.address.api_key, 2, "/v1/responses") + b"{}")
    await asyncio.sleep(1)


KINDS: list[Client] = [
    *(slow_sender, half_a_request, wrong_tokens, a_flood, a_huge_body, endless_headers, not_http, a_bad_length),
    *(both_lengths, leaves_its_stream, leaves_its_body, never_reads),
]


async def hostile(at: Scene, kind: Client) -> None:
    """Connect and misbehave, then go away; the server may close the connection at any time."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        reader, writer = await asyncio.open_connection(at.endpoint.config.host, at.endpoint.port)
        try:
            async with asyncio.timeout(_STAY):
                await kind(at, reader, writer)
        finally:
            writer.transport.abort()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_episode_is_undisturbed_by_200_hostile_clients(caplog: pytest.LogCaptureFixture) -> None:
    """The clients with the episode's own token hold their samples, which are cancelled."""

    async def go() -> tuple[object, object]:
        records = []
        for clients in (0, CLIENTS):
            async with scene("hello there", kind=Streaming, config=EndpointConfig(calls=None), max_turns=1000) as at:
                model = at.model
                assert isinstance(model, Streaming)
                at.endpoint._connections.limit = 100
                at.endpoint._connections.patience = 120.0  # the episode's client may be slow on a busy machine, too
                before = open_files()
                crowd = [asyncio.create_task(hostile(at, KINDS[n % len(KINDS)])) for n in range(clients)]
                said = ["hi"]
                model.before = 4
                for turn in range(5):
                    asking = asyncio.create_task(at.chat(*said))
                    answer = (await asking).json()
                    said += [answer["choices"][0]["message"]["content"], f"more {turn}"]
                async with asyncio.timeout(60):
                    await asyncio.gather(*crowd)
                    while at.endpoint._calls or len(at.endpoint._connections) > 1:
                        await asyncio.sleep(0.05)
                whole = at.recording.trajectories
                records.append([[(span.tokens, span.trained, span.logprobs) for span in each.spans] for each in whole])
                assert open_files() <= before + 2, "files of connections remain open"
                assert (await at.chat("still there?")).status_code == 200
        return records[0], records[1]

    async def bounded() -> None:
        async with asyncio.timeout(120):
            alone, disturbed = await go()
        assert disturbed == alone

    asyncio.run(bounded())
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
