"""Clients that misbehave or disconnect, and exhausted budgets. Each has one defined outcome."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.cpu_time import cpu_seconds_below
from tests.endpoint.agents import Scene, scene
from tests.endpoint.test_api import ADD, run, user
from tests.forks import program_fork
from tests.tiny import tiny_tokenizer
from whet.base.errors import ConfigError, GeneratorError
from whet.chat.renderer import Renderer
from whet.endpoint.config import EndpointConfig
from whet.endpoint.connections import Connections
from whet.endpoint.conversations import Conversations
from whet.endpoint.server import Endpoint

JSON = {"content-type": "application/json"}


async def settled(at: Scene, cancelled: int) -> None:
    """Wait until this number of samples has been cancelled."""
    async with asyncio.timeout(60):
        while at.model.cancelled < cancelled:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_the_sample_of_a_disconnected_client_is_cancelled_and_not_recorded(stream: bool) -> None:
    async def vanish(at: Scene) -> None:
        at.model.gate.clear()
        call = asyncio.create_task(at.chat("hi", stream=stream))
        while not at.model.sampling:
            await asyncio.sleep(0.01)
        call.cancel()
        await settled(at, 1)
        assert at.recording.trajectories == []
        at.model.gate.set()
        assert (await at.chat("hi")).status_code == 200
        assert [len(branch.spans) for branch in at.recording.trajectories] == [2]

    run("ok", vanish)


def test_the_end_of_an_episode_ends_its_calls_and_its_token() -> None:
    async def go() -> None:
        async with scene("ok") as at:
            conversations = Conversations(at.recording)
            with at.endpoint.open(conversations) as address:
                headers = {"authorization": f"Bearer {address.api_key}"}
                at.model.gate.clear()
                body = {"model": "m", "messages": [user("hi")]}
                call = asyncio.create_task(at.http.post("/chat/completions", json=body, headers=headers))
                while not at.model.sampling:
                    await asyncio.sleep(0.01)
                await conversations.close()
                assert (await call).status_code == 410
            late = await at.http.post("/chat/completions", json=body, headers=headers)
            assert late.status_code == 410
            assert "has ended" in late.json()["error"]["message"]

    asyncio.run(go())


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer stolen", "Basic abc", "Bearer \u00e9"])
def test_an_unknown_token_is_refused_on_every_route(header: str) -> None:
    async def ask(at: Scene) -> None:
        root = at.address.base_url.removesuffix("/v1")
        headers = {"authorization": header.encode("latin-1")}
        for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
            assert (await at.http.post(root + path, content=b"{}", headers=headers)).status_code == 401
        assert (await at.http.get(f"{root}/v1/models", headers=headers)).status_code == 401

    run("ok", ask)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": "m", "messages": "\xff"}', b"[" * 100_000, b'{"a":' * 50_000]
)
def test_an_invalid_request_is_400_without_a_traceback(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(at: Scene) -> None:
        for path in ("/chat/completions", "/responses"):
            answer = await at.http.post(path, content=body, headers=JSON)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
        assert not caplog.records

    run("ok", ask)


def test_a_body_of_a_gigabyte_is_refused_before_it_is_read() -> None:
    async def ask(at: Scene) -> None:
        reader, writer = await asyncio.open_connection(at.endpoint.config.host, at.endpoint.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {at.address.api_key}\r\n"
        writer.write(f"{head}content-length: {2**30}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert b" 413 " in await reader.readline()
        writer.close()

        async def endless() -> object:
            while True:
                yield b" " * 2**20

        try:
            answer = await at.http.post("/chat/completions", content=endless())  # type: ignore[arg-type]
        except httpx.TransportError:
            pass  # the server closed the connection
        else:
            assert answer.status_code == 413

    run("ok", ask)


def test_unknown_routes_methods_and_models_are_refused_by_name() -> None:
    async def ask(at: Scene) -> None:
        route = await at.http.post("/embeddings", json={})
        assert (route.status_code, route.json()["error"]["message"]) == (404, "POST /v1/embeddings is not served here")
        assert (await at.http.get("/chat/completions")).status_code == 405
        model = await at.http.post("/chat/completions", json={"model": "gpt-x", "messages": [user("hi")]})
        assert model.status_code == 404
        assert model.json()["error"]["message"] == "the model 'gpt-x' does not exist; this endpoint serves 'mine'"
        named = await at.http.post("/chat/completions", json={"model": "mine", "messages": [user("hi")]})
        assert named.status_code == 200

    run("ok", ask, name="mine")


def test_a_call_after_an_exhausted_budget_is_refused_and_not_retried() -> None:
    async def ask(at: Scene) -> None:
        await at.chat("one")
        with pytest.raises(openai.RateLimitError, match="used up its turns"):
            await at.openai.chat.completions.create(model="m", messages=[user("two")])
        assert at.conversations.limit == "turns"
        assert len(at.model.requests) == 1

    run("ok", ask, max_turns=1)


def test_a_full_context_is_refused_like_openai_does() -> None:
    async def ask(at: Scene) -> None:
        await at.chat("one")
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is exceeded") as full:
            await at.openai.chat.completions.create(model="m", messages=[user("x" * 1000)])
        assert full.value.code == "context_length_exceeded"
        assert at.conversations.limit == "tokens"

    run("ok", ask)


def test_an_error_of_the_generator_is_500_without_retries_and_recorded() -> None:
    def broken(_: str) -> str:
        raise GeneratorError("the engine is gone")

    async def ask(at: Scene) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await at.openai.chat.completions.create(model="m", messages=[user("hi")])
        assert isinstance(at.conversations.failure, GeneratorError)
        assert len(at.model.requests) == 1

    run(broken, ask)


def test_it_listens_on_loopback_and_a_free_port() -> None:
    async def go() -> None:
        async with scene("ok") as at:
            assert at.address.base_url == f"http://127.0.0.1:{at.endpoint.port}/v1"
            taken = Endpoint(at.endpoint.renderer, EndpointConfig(port=at.endpoint.port))
            with pytest.raises(
                ConfigError, match=f"can't listen on 127.0.0.1:{at.endpoint.port}: Address already in use; choose"
            ):
                taken.start()
            port = at.endpoint.port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)

    before = set(threading.enumerate())
    asyncio.run(go())
    assert not set(threading.enumerate()) - before


def test_unusual_text_is_returned_unchanged() -> None:
    odd = "\u2028 😀 \x00 </s> \ud7ff"

    async def ask(at: Scene) -> None:
        answer = await at.chat("hi")
        assert json.loads(answer.text)["choices"][0]["message"]["content"] == odd

    run(odd, ask)


async def half_open(at: Scene, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Return connections that have sent half of a request's head."""
    connections = [await asyncio.open_connection(at.endpoint.config.host, at.endpoint.port) for _ in range(number)]
    for _, writer in connections:
        writer.write(b"GET /v1/mod")
    return connections


def test_idle_connections_are_closed_oldest_first_and_calls_are_answered() -> None:
    async def go() -> None:
        async with scene("ok") as at:
            at.endpoint._connections.limit = 10
            at.model.gate.clear()
            working = asyncio.create_task(at.chat("hi"))
            while not at.model.sampling:
                await asyncio.sleep(0.01)
            connections = await half_open(at, 60)
            assert (await at.openai.models.list()).data[0].id == "policy"
            assert len(at.endpoint._connections) <= 10
            async with asyncio.timeout(60):
                for reader, _ in connections[:50]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
            at.model.gate.set()
            assert (await working).status_code == 200, "its connection is not idle"
            for _, writer in connections:
                writer.close()

    asyncio.run(go())


def test_a_connection_without_a_valid_token_is_closed_after_a_time() -> None:
    async def go() -> None:
        async with scene("ok") as at:
            at.endpoint._connections.patience = 0.2
            [(silent, first)] = await half_open(at, 1)
            asking, second = await asyncio.open_connection(at.endpoint.config.host, at.endpoint.port)
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionError):
                    assert await silent.read() == b""
                with contextlib.suppress(ConnectionError):
                    while True:
                        second.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n")
                        assert b" 401 " in await asking.readuntil(b"\r\n\r\n")
                        await asking.readexactly(10)
                        await second.drain()
            first.close()
            second.close()

    with contextlib.suppress(asyncio.IncompleteReadError):
        asyncio.run(go())


def test_a_request_that_has_arrived_in_time_is_answered_however_late_the_loop_is() -> None:
    async def go() -> None:
        async with scene("ok") as at:
            at.endpoint._connections.patience = 0.2
            reader, writer = await asyncio.open_connection(at.endpoint.config.host, at.endpoint.port)
            while not len(at.endpoint._connections):
                await asyncio.sleep(0)
            head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {at.address.api_key}\r\n\r\n"
            writer.write(head.encode())
            time.sleep(0.3)  # the loop is blocked
            async with asyncio.timeout(60):
                assert b" 200 " in await reader.readline()
            writer.close()

    asyncio.run(go())


SERVER = """
import asyncio, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from tests.endpoint.agents import scene

async def go():
    async with scene("ok") as at:
        print(at.endpoint.port, at.address.api_key, flush=True)
        while not os.path.exists(sys.argv[1]):
            await asyncio.sleep(0.01)
        print((await at.chat("hi")).status_code, len(os.listdir("/proc/self/fd")), flush=True)

asyncio.run(go())
"""


def test_the_server_survives_more_connections_than_it_may_open_files(tmp_path: Path) -> None:
    with program_fork(SERVER, str(tmp_path / "go")) as server:
        port = int(server.stdout.readline().split()[0])
        connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
        for connection in connections:
            connection.sendall(b"POST /v1/chat")
        (tmp_path / "go").touch()
        out, err = server.communicate(60)
    for connection in connections:
        connection.close()
    status, files = map(int, out.split())
    assert status == 200, err
    assert files < 120
    assert "Traceback" not in err


def test_the_limit_on_connections_follows_from_the_limit_on_files() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert Connections().limit == (4096 if soft == resource.RLIM_INFINITY else min(4096, soft // 2))


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/tokenize"])
def test_long_requests_are_refused_before_they_are_rendered(path: str) -> None:
    long = "word " * 400_000
    bodies = {
        "/chat/completions": {"model": "m", "messages": [user(long)]},
        "/responses": {"model": "m", "input": long},
        "/tokenize": {"prompt": long},
    }

    async def ask(at: Scene) -> None:
        root = at.address.base_url.removesuffix("/v1" if path == "/tokenize" else "")
        with cpu_seconds_below(4):  # rendering it takes ten
            answer = await at.http.post(root + path, json=bodies[path])
        assert answer.status_code == 400
        assert "more than" in answer.json()["error"]["message"]

    run("ok", ask)


def test_many_small_messages_and_long_tools_are_refused_as_too_long() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}

    async def ask(at: Scene) -> None:
        for body in ({"messages": [user("")] * 5_000}, {"messages": [user("hi")], "tools": [tool]}):
            answer = await at.http.post("/chat/completions", json={"model": "m", **body})
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert at.conversations.failure is None

    run("ok", ask)


def test_tools_for_a_model_without_tool_support_are_400_and_the_episode_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(at: Scene) -> None:
        at.recording.renderer = at.endpoint.renderer = Renderer(tiny_tokenizer())
        root = at.address.base_url.removesuffix("/v1")
        counted = await at.http.post(f"{root}/tokenize", json={"messages": [user("hi")], "tools": [ADD]})
        for refused in (await at.chat("hi", tools=[ADD]), await at.chat("hi", tools=[ADD]), counted):
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "tools"
            assert "leaves out the tools; set tools_as_text: true" in refused.json()["error"]["message"]
        assert at.conversations.failure is None
        assert (await at.chat("hi")).status_code == 200

    run("ok", ask)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": Infinity}',
        '{"x": 1, "x": 2}',
        "[" * 100_000,
        '{"a":' * 300 + "1" + "}" * 300,
        "[1]",
        {"x": 1e999},
    ],
)
def test_invalid_arguments_of_a_call_are_400(arguments: object) -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        user("a"),
        {"role": "assistant", "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]

    async def ask(at: Scene) -> None:
        body = json.dumps({"model": "m", "messages": history})
        answer = await at.http.post("/chat/completions", content=body, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].endswith("function.arguments")
        tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
        if isinstance(arguments, dict):
            body = json.dumps({"model": "m", "messages": [user("a")], "tools": [tool]})
            assert (await at.http.post("/chat/completions", content=body, headers=JSON)).status_code == 400

    run("ok", ask)
