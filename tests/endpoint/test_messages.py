"""Anthropic's client gets correct answers from ``/v1/messages``, and its calls are recorded."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.endpoint.agents import RENDERER, Scene, call, scene
from tests.endpoint.test_api import user
from whet.endpoint.messages import MessagesRequest
from whet.endpoint.messages_events import anthropic_error
from whet.endpoint.request import ApiError, read

anthropic = pytest.importorskip("anthropic", reason="the client of this API is in the test extra")

ADD: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}


def run(
    answer: Any, test: Callable[[Scene, Any], Awaitable[None]], *, name: str | None = None, **sampling: Any
) -> None:
    """Play a test with an endpoint and Anthropic's client."""

    async def go() -> None:
        async with scene(answer, name=name, **sampling) as at:
            root = at.address.base_url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=root, api_key=at.address.api_key, timeout=60) as client:
                await test(at, client)

    asyncio.run(go())


def asked(*messages: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 200, "messages": list(messages), **changes}


def test_a_chat_of_two_turns_is_one_branch_whose_tokens_are_recorded() -> None:
    async def chat(at: Scene, client: Any) -> None:
        first = await client.messages.create(**asked(user("hi"), system="Be brief."))
        assert [block.text for block in first.content] == ["hello"]
        assert (first.stop_reason, first.model, first.role) == ("end_turn", "claude-x", "assistant")
        reply = {"role": "assistant", "content": first.content}
        parts = [{"type": "text", "text": "mo", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "re"}]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        again = asked(user("hi"), reply, user(parts), system=system)  # type: ignore[arg-type]
        second = await client.messages.create(**again)
        [branch] = at.recording.trajectories
        assert [span.trained for span in branch.spans] == [False, True, False, True]
        assert branch.messages[0] == {"role": "system", "content": "Be brief."}
        assert branch.messages[3] == user("more")
        assert list(branch.spans[0].tokens) == RENDERER.render_prompt(branch.messages[:2])
        prompt = sum(len(span.tokens) for span in branch.spans[:3])
        assert (second.usage.input_tokens, second.usage.cache_read_input_tokens) == (prompt - 2, 2)
        assert second.usage.output_tokens == len(branch.spans[3].tokens)

    run("hello", chat)


def test_a_call_and_its_result_stay_in_one_branch() -> None:
    def model(prompt: str) -> str:
        return "ah</think>It is 3." if "<tool_response>" in prompt else "so</think>" + call("add", a=1, b=2)

    async def chat(at: Scene, client: Any) -> None:
        first = await client.messages.create(**asked(user("1 + 2?"), tools=[ADD]))
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        assert first.stop_reason == "tool_use"
        used = first.content[1]
        assert (used.name, used.input) == ("add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "3"}]}
        turns: Any = [{"role": "assistant", "content": first.content}, user([result, {"type": "text", "text": "so?"}])]  # type: ignore[arg-type]
        second = await client.messages.create(**asked(user("1 + 2?"), *turns, tools=[ADD]))
        assert second.content[-1].text == "It is 3."
        [branch] = at.recording.trajectories
        assert [message["role"] for message in branch.messages] == ["user", "assistant", "tool", "user", "assistant"]
        assert branch.messages[2] == {"role": "tool", "tool_call_id": used.id, "content": "3", "name": "add"}
        assert '"name": "add"' in RENDERER.decode(branch.spans[0].tokens), "the tool is missing in the prompt"

    run(model, chat, thinking="on")


@pytest.mark.parametrize("answer", ["a" * 150, call("add", text="b" * 100) + call("add", a=2), "", "hm</think>yes"])
def test_a_streamed_answer_equals_the_complete_one(answer: str) -> None:
    async def chat(at: Scene, client: Any) -> None:
        whole = await client.messages.create(**asked(user("hi")))
        async with client.messages.stream(**asked(user("hi"))) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
        hidden = {"id"}
        contents = [[block.model_dump(exclude=hidden) for block in message.content] for message in (final, whole)]
        assert contents[0] == contents[1]
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        assert final.usage.input_tokens == whole.usage.input_tokens
        assert (events[0], events[-1]) == ("message_start", "message_stop")
        assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)

    run(answer, chat, thinking="on" if "</think>" in answer else None)


def test_the_end_of_a_reply_is_named() -> None:
    async def ask(at: Scene, client: Any) -> None:
        cut = await client.messages.create(**asked(user("hi"), max_tokens=3))
        assert cut.stop_reason == "max_tokens"
        assert at.conversations.limit is None, "the agent requested this limit"
        ended = await client.messages.create(**asked(user("hi"), stop_sequences=["END"]))
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "END")
        assert ended.content[0].text == "the END", "what is sent back must be what was sampled"
        with pytest.raises(anthropic.BadRequestError, match=r"sampling\.stop"):
            await client.messages.create(**asked(user("hi"), stop_sequences=["never"]))

    run("the END", ask, stop=("END",))


def test_models_are_listed_and_tokens_counted() -> None:
    async def ask(at: Scene, client: Any) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("claude-x")).display_name == "claude-x"
        counted = await client.messages.count_tokens(model="m", messages=[user("hi")], system="s")
        rendered = RENDERER.render_prompt([{"role": "system", "content": "s"}, user("hi")])
        assert counted.input_tokens == len(rendered)
        assert not at.model.requests

    run("hello", ask)


def test_errors_have_the_types_of_anthropic() -> None:
    async def ask(at: Scene, client: Any) -> None:
        with pytest.raises(anthropic.AuthenticationError, match="needs a valid token"):
            await client.with_options(api_key="stolen").messages.create(**asked(user("hi"), model="mine"))
        with pytest.raises(anthropic.NotFoundError, match="the model 'claude-x' does not exist"):
            await client.messages.create(**asked(user("hi")))
        with pytest.raises(anthropic.NotFoundError, match=r"'not_found_error'.*is not served here"):
            await client.post("/v1/files", cast_to=object)
        await client.messages.create(**asked(user("hi"), model="mine"))
        with pytest.raises(anthropic.RateLimitError, match="used up its turns") as refused:
            await client.messages.create(**asked(user("ho"), model="mine"))
        assert refused.value.body["error"]["type"] == "rate_limit_error"
        assert at.conversations.refused(refused.value, at.address.base_url)
        assert len(at.model.requests) == 1, "the client tried again"
        broken = await at.http.post("/messages", content=b"{")
        assert (broken.status_code, broken.json()["type"]) == (400, "error")
        assert anthropic_error(ApiError(413, "big"))["error"] == {"type": "request_too_large", "message": "big"}
        assert anthropic_error(ApiError(503, "gone"))["error"]["type"] == "api_error"

    run("ok", ask, name="mine", max_turns=1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "only .* is supported|is not supported, only"),
        ({"output_config": {"effort": "high"}}, "output_config is not supported"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "must not be the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "an image with its data URL",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "user",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [7]}]}, "a part of type 'int'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    async def ask(at: Scene, client: Any) -> None:
        with pytest.raises(anthropic.BadRequestError, match=why):
            await client.messages.create(**asked(user("hi")), extra_body=changes)
        assert not at.model.requests

    run("hello", ask)


@pytest.mark.parametrize(("kind", "mode"), [("enabled", "on"), ("disabled", "off"), ("adaptive", None)])
def test_thinking_is_a_setting_of_sampling(kind: str, mode: str | None) -> None:
    body = json.dumps(asked(user("hi"), thinking={"type": kind})).encode()
    assert read(MessagesRequest, body).question().sampling.thinking == mode
