"""Clients that ask for a stream get the reply while it is sampled; what is recorded is the same without one."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import openai
import pytest

from tests.endpoint.agents import RENDERER, Scene, Scripted, Streaming, call, scene
from tests.endpoint.test_api import ADD, FLAT, user
from tests.endpoint.test_faults import settled
from tests.grids import grid
from tests.tiny import tiny_qwen3, tiny_tokenizer
from whet.base.errors import GeneratorError
from whet.endpoint.conversations import Conversations
from whet.endpoint.server import Endpoint
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording

anthropic = pytest.importorskip("anthropic", reason="the client of this API is in the test extra")

Api = Callable[[Scene], Any]
ANSWERS = ["a word " * 20, "It is " + call("add", a=1) + call("add", a=2), call("add", text="b" * 90), "", " a <tool"]


def events(at: Scene, api: str, **changes: Any) -> Any:
    """Return the context of a stream of an official client."""
    if api == "chat":
        return at.openai.chat.completions.stream(model="m", messages=[user("hi")], **changes)
    if api == "responses":
        return at.openai.responses.stream(model="m", input="hi", **changes)
    root = at.address.base_url.removesuffix("/v1")
    client = anthropic.AsyncAnthropic(base_url=root, api_key=at.address.api_key, timeout=60, max_retries=0)
    return client.messages.stream(model="m", max_tokens=200, messages=[user("hi")], **changes)


def shown(event: Any) -> str:
    """Return the text in an event of any of the clients."""
    kinds = {"content.delta": "delta", "response.output_text.delta": "delta", "text": "text"}
    return str(getattr(event, kinds[event.type])) if event.type in kinds else ""


def run(answer: Any, test: Callable[[Scene, Streaming], Awaitable[None]], *, rest: bool = True, **more: Any) -> None:
    async def go() -> None:
        async with scene(answer, kind=Streaming, **more) as at:
            assert isinstance(at.model, Streaming)
            if rest:
                at.model.rest.set()
            await test(at, at.model)

    asyncio.run(go())


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_text_arrives_before_the_model_has_ended(api: str) -> None:
    async def follow(at: Scene, model: Streaming) -> None:
        model.before = 6
        seen, recorded = "", True
        async with asyncio.timeout(60), events(at, api) as stream:
            async for event in stream:
                seen += shown(event)
                if seen == "hello" and not model.rest.is_set():
                    recorded = bool(at.recording.trajectories)
                    model.rest.set()
        assert seen == "hello again"
        assert not recorded, "the reply was recorded before it ended"

    run("hello again", follow, rest=False)


@pytest.mark.parametrize(
    ("api", "answer"),
    grid(
        ["chat", "responses", "messages"],
        [*ANSWERS, "hm\nso\n</think>\n\nyes, " + call("add", a=1), "cut off in a thou"],
    ),
)
def test_a_stream_ends_as_the_same_reply_and_the_same_record(api: str, answer: str) -> None:
    async def record(kind: type[Scripted]) -> tuple[Any, Any, Any]:
        thinking = "on" if "</think>" in answer or "thou" in answer else None
        async with scene(answer, kind=kind, thinking=thinking) as at:
            if isinstance(at.model, Streaming):
                at.model.rest.set()
            tools: Any = {"chat": [ADD], "responses": [FLAT]}.get(api, [{**FLAT, "input_schema": {}}])
            if api == "messages":
                tools = [{"name": "add", "input_schema": {"type": "object"}}]
            async with events(at, api, tools=tools) as stream:
                texts = [shown(event) async for event in stream]
                ending = {"chat": "get_final_completion", "responses": "get_final_response"}
                final = await getattr(stream, ending.get(api, "get_final_message"))()
            return "".join(texts), without_ids(final.model_dump()), [asdict(t) for t in at.recording.trajectories]

    whole, streamed = asyncio.run(record(Scripted)), asyncio.run(record(Streaming))
    assert streamed == whole


async def consume(opening: Any) -> None:
    """Read a stream to its end."""
    async with asyncio.timeout(60), opening as stream:
        async for _ in stream:
            pass


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        ours = ("id", "created", "created_at", "item_id")
        return {name: without_ids(part) for name, part in value.items() if name not in ours}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_the_sample_of_a_client_that_leaves_its_stream_is_cancelled_and_not_recorded(api: str) -> None:
    async def leave(at: Scene, model: Streaming) -> None:
        model.before = 6
        async with asyncio.timeout(60), events(at, api) as stream:
            async for event in stream:
                if shown(event):
                    break
        await settled(at, 1)
        assert at.recording.trajectories == []
        model.rest.set()
        assert (await at.chat("hi")).status_code == 200
        assert [len(branch.spans) for branch in at.recording.trajectories] == [2]
        assert not at.endpoint._calls, "a call is still counted"

    run("hello again", leave, rest=False)


def test_thoughts_that_a_budget_ends_are_streamed_as_they_are_recorded() -> None:
    async def think(at: Scene, model: Streaming) -> None:
        async with at.openai.chat.completions.stream(model="m", messages=[user("hi")]) as stream:
            deltas = [event.chunk.choices[0].delta async for event in stream if event.type == "chunk"]
        [branch] = at.recording.trajectories
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        text = "".join(delta.content or "" for delta in deltas)
        assert (thought, text) == (branch.messages[1]["reasoning_content"], branch.messages[1]["content"])
        assert [span.trained for span in branch.spans] == [False, True, False, True]
        assert thought.startswith("first")
        assert text.startswith("first")

    run("first I think and think", think, thinking="on", thinking_budget=8)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_an_error_after_the_beginning_reaches_the_client(api: str) -> None:
    class Dying(Streaming):
        async def stream(self, *args: Any) -> Any:
            args[3](RENDERER.encode_text("hello"))
            await asyncio.sleep(0.05)
            raise GeneratorError("the engine is gone")

    async def go() -> None:
        async with scene("", kind=Dying) as at:
            with pytest.raises((openai.APIError, anthropic.APIError), match="the engine is gone"):
                await consume(events(at, api))
            assert isinstance(at.conversations.failure, GeneratorError)

    asyncio.run(go())


def test_a_refused_call_has_its_status_though_it_asked_for_a_stream() -> None:
    async def ask(at: Scene, model: Streaming) -> None:
        await at.chat("one")
        answer = await at.chat("two", stream=True)
        assert answer.status_code == 429
        assert not at.endpoint._calls

    run("ok", ask, max_turns=1)


def test_the_built_in_engine_hands_out_tokens_as_it_samples_them() -> None:
    async def follow() -> None:
        engine = TorchGenerator(TorchGeneratorConfig(max_context=512), tiny_qwen3(), tiny_tokenizer())
        sampling = Sampling(max_turns=9, max_new_tokens=60)
        endpoint = Endpoint(RENDERER)
        endpoint.start()
        try:
            records = []
            for stream in (False, True):
                conversations = Conversations(Recording(engine, RENDERER, sampling, "e", seed=3))
                with endpoint.open(conversations) as address:
                    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
                        text, chunks = "", 0
                        asked: Any = {"model": "m", "messages": [user("hi")]}
                        if stream:
                            async for chunk in await client.chat.completions.create(**asked, stream=True):
                                text += chunk.choices[0].delta.content or ""
                                chunks += bool(chunk.choices[0].delta.content)
                        else:
                            text = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
                    records.append((text, [asdict(t) for t in conversations.recording.trajectories]))
                await conversations.close()
            assert records[0] == records[1]
            assert chunks > 5
        finally:
            await endpoint.close()
            await engine.close()

    asyncio.run(follow())


def test_a_raw_stream_ends_with_done() -> None:
    async def ask(at: Scene, model: Streaming) -> None:
        body = {"model": "m", "messages": [user("hi")], "stream": True, "stream_options": {"include_usage": True}}
        lines = [line async for line in (await at.http.post("/chat/completions", json=body)).aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[-1]["usage"]["completion_tokens"] == 6

    run("hello", ask)
