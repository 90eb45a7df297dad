"""Engines on servers hand out tokens as the server sends them; the completion is the same as without a stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.contracts.engine_contract import PROMPT
from tests.endpoint.agents import RENDERER
from tests.engines.server_double import KINDS, doubles
from tests.engines.test_server_faults import served, vllm_like
from tests.grids import taking_turns
from tests.tiny import tiny_llama, tiny_tokenizer
from whet.base.errors import GeneratorError
from whet.endpoint.conversations import Conversations
from whet.endpoint.server import Endpoint
from whet.engines.base import SamplingParams, StreamingEngine
from whet.engines.server.config import RemoteConfig
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording

LONG = SamplingParams(40, seed=7)


@dataclass
class Server:
    """A double, its protocol, and a file: while it is there, no long completion ends."""

    protocol: str
    url: str
    holds: Path


@pytest.fixture(scope="module", params=taking_turns(KINDS, ["vllm", "sglang"]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_llama(initializer_range=0.3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with doubles(request.param, folder) as (one,):
        yield Server(request.param.removeprefix("incremental_"), one.url, folder / "held")


async def ready(url: str, protocol: str = "vllm") -> Any:
    """Return an engine whose server has weights already."""
    settings: Any = {"protocol": protocol}
    config = RemoteConfig(urls=[url], **settings, dtype="float32", max_context=512, deadline=20.0)
    engine: Any = config.build(tiny_llama().config, tiny_tokenizer())
    await engine.pause()
    await engine.resume(0)
    engine.weights_complete = True
    return engine


def test_tokens_come_in_pieces_and_the_completion_is_the_same(server: Server) -> None:
    async def go() -> None:
        engine = await ready(server.url, server.protocol)
        streams: object = engine
        assert isinstance(streams, StreamingEngine)
        for params in (LONG, SamplingParams(1), SamplingParams(40, greedy=True, stop_token_ids=(5, 9))):
            whole, pieces = await engine.sample(PROMPT, params, "s"), list[list[int]]()
            streamed = await engine.stream(PROMPT, params, "s", pieces.append)
            assert [token for piece in pieces for token in piece] == whole.tokens
            assert (streamed.tokens, streamed.finish_reason) == (whole.tokens, whole.finish_reason)
            assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-6)
            assert streamed.versions == whole.versions
            assert len(pieces) > 3 or params is not LONG
        await engine.close()

    asyncio.run(go())


def test_a_client_of_the_endpoint_gets_pieces_and_the_same_is_recorded(server: Server) -> None:
    async def go() -> None:
        engine = await ready(server.url, server.protocol)
        endpoint, records = Endpoint(RENDERER), []
        endpoint.start()
        for stream in (False, True):
            recording = Recording(engine, RENDERER, Sampling(max_new_tokens=60), "e", seed=3)
            with endpoint.open(Conversations(recording)) as at:
                async with openai.AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client:
                    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                    if stream:
                        server.holds.touch()
                        texts = list[str]()
                        try:
                            async for chunk in await client.chat.completions.create(**asked, stream=True):
                                texts.append(chunk.choices[0].delta.content or "")
                                if texts[-1]:  # before the end of the completion
                                    server.holds.unlink(missing_ok=True)
                        finally:
                            server.holds.unlink(missing_ok=True)
                        assert sum(map(bool, texts)) > 1
                        text = "".join(texts)
                    else:
                        text = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
            [branch] = recording.trajectories
            records.append((text, branch.tokens))
        assert records[0] == records[1]
        await endpoint.close()
        await engine.close()

    asyncio.run(go())


def event(*tokens: int, finish: str | None = None) -> dict[str, Any]:
    choice = {
        "token_ids": list(tokens),
        "finish_reason": finish,
        "logprobs": {"content": [{"logprob": -0.5} for _ in tokens]},
    }
    versions = [{"version": "", "start": 0, "end": 1}] if finish else None
    return {"choices": [choice | {"weight_versions": versions}]}


def attempts(*of: Any) -> Any:
    """Return the answers of a server to streamed requests, one after another; an exception breaks the connection."""
    left = iter(of)

    async def stream(values: list[Any]) -> AsyncIterator[Any]:
        for value in values:
            if isinstance(value, Exception):
                await asyncio.sleep(0.2)  # the events before were sent
                raise value
            yield value

    def answer(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return event(5, finish="length") | {
                "choices": [
                    event(5, finish="length")["choices"][0]
                    | {"weight_versions": [], "logprobs": {"content": [{"logprob": 0.0}]}}
                ]
            }
        found = next(left)
        return stream(found) if isinstance(found, list) else found

    return answer


def follow(answers: Any) -> tuple[list[list[int]], Any]:
    """Return the pieces of a completion, and the completion or the error."""
    pieces: list[list[int]] = []
    label = {"weight_version": "default"}

    def rename(body: dict[str, Any]) -> Any:
        label["weight_version"] = body["new_version"]
        return {"success": True}

    routes = {"/inference/v1/generate": answers, "/update_weight_version": rename, "/weight_info": lambda _: label}
    with served(vllm_like(routes)) as url:

        async def go() -> Any:
            engine = await ready(url)
            engine._version = lambda label: 0  # these servers have no weights
            try:
                return await engine.stream(PROMPT, LONG, "s", pieces.append)
            except GeneratorError as error:
                return error
            finally:
                await engine.close()

        return pieces, asyncio.run(go())


def test_a_stream_that_breaks_off_is_asked_for_again_and_no_token_is_handed_out_twice() -> None:
    pieces, done = follow(attempts([event(1, 2), OSError("cut")], [event(1), event(2, 3), event(4, finish="length")]))
    assert done.tokens == [1, 2, 3, 4]
    assert pieces == [[1, 2], [3], [4]]


def test_an_error_in_a_stream_is_named() -> None:
    _, error = follow(attempts([event(1), {"error": {"message": "out of memory", "code": 500}}]))
    assert isinstance(error, GeneratorError)
    assert "failed at /inference/v1/generate" in str(error)
    assert "out of memory" in str(error)


def test_an_event_without_log_probs_is_named() -> None:
    _, error = follow(attempts([{"choices": [{"token_ids": [1]}]}]))
    assert isinstance(error, GeneratorError)
    assert "without tokens, log-probs or the version" in str(error)


def test_a_server_that_answers_at_once_serves_as_well() -> None:
    pieces, done = follow(attempts(event(1, 2, finish="stop")))
    assert (done.tokens, done.finish_reason, pieces) == ([1, 2], "stop", [])
