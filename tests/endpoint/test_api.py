"""OpenAI's client gets correct answers from the endpoint, and its calls are recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.endpoint.agents import RENDERER, Scene, call, scene
from tests.tiny_vision import picture

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
FLAT: Any = {"type": "function", **ADD["function"]}


def run(answer: Any, test: Callable[[Scene], Awaitable[None]], **sampling: Any) -> None:
    async def go() -> None:
        async with scene(answer, **sampling) as opened:
            await test(opened)

    asyncio.run(go())


def contents(response: Any) -> list[Any]:
    """Return the texts and calls of a response, without its ids."""
    fields = {"text", "arguments", "name", "type"}
    flat = [part for item in response.output for part in [item, *(getattr(item, "content", None) or [])]]
    return [part.model_dump(include=fields) for part in flat]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_chat_of_two_turns_is_one_branch_whose_tokens_are_recorded() -> None:
    async def chat(at: Scene) -> None:
        first = await at.openai.chat.completions.create(model="gpt-x", messages=[user("hi")])
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason, first.model) == ("hello", "stop", "gpt-x")
        again = [user("hi"), message.model_dump(), user("more")]
        second = await at.openai.chat.completions.create(model="gpt-x", messages=again)
        [branch] = at.recording.trajectories
        assert [span.trained for span in branch.spans] == [False, True, False, True]
        assert branch.spans[1].versions == (3, 3)
        assert second.usage is not None
        assert second.usage.prompt_tokens == sum(len(span.tokens) for span in branch.spans[:3])
        assert second.usage.completion_tokens == len(branch.spans[3].tokens) == len(branch.spans[3].logprobs or [])
        assert second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == 2

    run("hello", chat)


def test_token_ids_and_log_probs_are_returned_on_request() -> None:
    async def chat(at: Scene) -> None:
        options: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        completion = await at.openai.chat.completions.create(
            model="m", messages=[user("hi")], logprobs=True, top_logprobs=0, extra_body=options
        )
        message: Any = completion.choices[0].message
        [branch] = at.recording.trajectories
        assert message.prompt_token_ids == list(branch.spans[0].tokens)
        assert message.generation_token_ids == list(branch.spans[1].tokens)
        assert message.generation_log_probs == list(branch.spans[1].logprobs or ())
        scored = completion.choices[0].logprobs
        assert scored is not None
        assert scored.content is not None
        assert [entry.token for entry in scored.content] == [f"token_id:{token}" for token in branch.spans[1].tokens]
        assert [entry.logprob for entry in scored.content] == list(branch.spans[1].logprobs or ())
        assert b"".join(bytes(entry.bytes or ()) for entry in scored.content) == "hello é👍<|im_end|>".encode()
        plain = (await at.chat("hi")).json()["choices"][0]
        assert set(plain["message"]) == {"role", "content"}
        assert plain["logprobs"] is None

    run("hello é👍", chat)


def test_a_call_and_its_result_stay_in_one_branch() -> None:
    def model(prompt: str) -> str:
        return "It is 3." if "<tool_response>" in prompt else call("add", a=1, b=2)

    async def chat(at: Scene) -> None:
        messages: list[Any] = [user("1 + 2?")]
        first = await at.openai.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.choices[0].message.content is None
        [tool_call] = first.choices[0].message.tool_calls or []
        assert tool_call.type == "function"
        assert (tool_call.function.name, tool_call.function.arguments) == ("add", '{"a": 1, "b": 2}')
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": tool_call.id, "content": "3"}]
        second = await at.openai.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert second.choices[0].message.content == "It is 3."
        [branch] = at.recording.trajectories
        assert branch.messages[2] == {"role": "tool", "tool_call_id": tool_call.id, "content": "3", "name": "add"}
        assert '"name": "add"' in RENDERER.decode(branch.spans[0].tokens), "the tool is missing in the prompt"

    run(model, chat)


def test_ids_of_calls_are_unique_in_the_episode() -> None:
    def model(prompt: str) -> str:
        return "done" if prompt.count("<tool_response>") == 2 else call("add", a=1) + call("add", a=2)

    async def chat(at: Scene) -> None:
        messages: list[Any] = [user("go")]
        ids = []
        for _ in range(2):
            message = (await at.chat(*messages, tools=[ADD])).json()["choices"][0]["message"]
            ids += [made["id"] for made in message["tool_calls"]]
            messages += [
                message,
                {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"},
            ]
        assert len(set(ids)) == 4
        assert {len(id) for id in ids} == {9}
        assert len(at.recording.trajectories) == 1

    run(model, chat)


def test_a_reply_that_differs_only_in_white_space_from_an_earlier_one_begins_no_branch() -> None:
    def model(prompt: str) -> str:
        return " yes\n" if "again" in prompt else "yes"

    async def chat(at: Scene) -> None:
        await at.chat("one")
        await at.chat("one", "yes", "again")
        await at.chat("one", "yes", "again", "yes", "more")
        assert len(at.recording.trajectories) == 1

    run(model, chat)


def test_messages_of_a_program_are_never_shortened() -> None:
    long = "fact " * 100

    async def chat(at: Scene) -> None:
        await at.chat("one")
        assert (await at.chat("one", "ok", long)).status_code == 200
        assert long in RENDERER.decode(at.recording.trajectories[0].tokens)
        full = await at.chat("one", "ok", long, "ok", "x" * 2000)
        assert full.json()["error"]["code"] == "context_length_exceeded"

    run("ok", chat, max_observation_tokens=40, max_episode_tokens=1500)


def test_tool_choice_none_shows_no_tools() -> None:
    async def chat(at: Scene) -> None:
        await at.chat("hi", tools=[ADD], tool_choice="none")
        assert '"add"' not in RENDERER.decode(at.recording.trajectories[0].tokens)

    run("hello", chat)


@pytest.mark.parametrize("answer", ["a" * 150, call("add", text="b" * 100), ""])
def test_a_streamed_chat_equals_the_complete_answer(answer: str) -> None:
    async def chat(at: Scene) -> None:
        whole = (await at.openai.chat.completions.create(model="m", messages=[user("hi")])).choices[0]
        async with at.openai.chat.completions.stream(
            model="m", messages=[user("hi")], stream_options={"include_usage": True}
        ) as stream:
            pieces = [event async for event in stream]
            final = await stream.get_final_completion()
        streamed = final.choices[0]
        assert (streamed.message.content or None) == (whole.message.content or None)
        assert streamed.finish_reason == whole.finish_reason
        calls = [
            [(c.function.name, c.function.arguments) for c in m.tool_calls or []]
            for m in (streamed.message, whole.message)
        ]  # type: ignore[union-attr]
        assert calls[0] == calls[1]
        assert final.usage is not None
        assert final.usage.completion_tokens > 0
        assert len(pieces) > 2

    run(answer, chat)


def test_responses_separate_reasoning_text_and_calls_and_can_be_continued() -> None:
    def model(prompt: str) -> str:
        return "so</think>three" if "<tool_response>" in prompt else "let me see</think>" + call("add", a=1)

    async def respond(at: Scene) -> None:
        items: list[Any] = [user("1 + 2?")]
        first = await at.openai.responses.create(model="m", instructions="Be brief.", input=items, tools=[FLAT])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        made: Any = first.output[1]
        assert (made.name, made.arguments) == ("add", '{"a": 1}')
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "3"})
        second = await at.openai.responses.create(model="m", instructions="Be brief.", input=items, tools=[FLAT])
        assert second.output_text == "three"
        assert second.status == "completed"
        [branch] = at.recording.trajectories
        assert [message["role"] for message in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]

    run(model, respond, thinking="on")


@pytest.mark.parametrize("answer", ["c" * 150, call("add", text="b" * 100)])
def test_a_streamed_response_equals_the_complete_answer(answer: str) -> None:
    async def respond(at: Scene) -> None:
        whole = await at.openai.responses.create(model="m", input="hi")
        async with at.openai.responses.stream(model="m", input="hi") as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert contents(final) == contents(whole)
        assert events[0] == "response.created"
        assert events[-1] == "response.completed"

    run(answer, respond)


def test_a_truncated_answer_is_marked_in_both_apis() -> None:
    async def ask(at: Scene) -> None:
        chat = await at.openai.chat.completions.create(model="m", messages=[user("hi")], max_tokens=3)
        assert chat.choices[0].finish_reason == "length"
        assert at.conversations.limit is None, "the agent requested this limit"
        response = await at.openai.responses.create(model="m", input="hi", max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        await at.chat("a long one")
        assert at.conversations.limit == "reply"
        assert [params.max_new_tokens for params in at.model.requests] == [3, 3, 20]

    run("hello" * 10, ask, max_new_tokens=20)


def test_models_are_listed_and_texts_tokenized() -> None:
    async def ask(at: Scene) -> None:
        assert [model.id async for model in at.openai.models.list()] == ["policy"]
        assert (await at.openai.models.retrieve("gpt-x")).id == "gpt-x", "any name is the policy"
        root = at.address.base_url.removesuffix("/v1")
        text = await at.http.post(f"{root}/tokenize", json={"prompt": "abc", "model": "m"})
        assert text.json() == {"count": 3, "tokens": RENDERER.encode_text("abc")}
        chat = await at.http.post(f"{root}/tokenize", json={"messages": [user("hi")]})
        assert chat.json()["tokens"] == RENDERER.render_prompt([user("hi")])

    run("hello", ask)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"logit_bias": {"1": 1}},
        {"top_logprobs": 5},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"stop": ["END"]},
        {"best_of": 2},
        {"temperature": "hot"},
        {"messages": []},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"tools": [{"type": "web_search"}]},
        {"max_tokens": "999"},
        {"parallel_tool_calls": False},
        {"messages": [{"role": "user", "content": "x", "name": "Ann"}]},
    ],
    ids=str,
)
def test_unsupported_parameters_are_refused_by_name(changes: dict[str, Any]) -> None:
    async def ask(at: Scene) -> None:
        answer = await at.chat("hi", **changes)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        name = next(iter(changes))
        assert error["param"].startswith(name)
        assert name in error["message"]
        assert not at.model.requests

    run("hello", ask)


@pytest.mark.parametrize("stop", ["END", ["END"], ["END", "STOP"], []], ids=str)
def test_texts_that_end_a_reply_are_accepted_if_the_recipe_has_them(stop: object) -> None:
    async def ask(at: Scene) -> None:
        assert (await at.chat("hi", stop=stop)).status_code == 200
        refused = await at.chat("hi", stop=["never", "END"])
        assert "sampling.stop" in refused.json()["error"]["message"]

    run("the END", ask, stop=("END", "STOP"))


def test_parameters_without_effect_are_accepted() -> None:
    async def ask(at: Scene) -> None:
        neutral = {
            "n": 1,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
            "logit_bias": {},
            "user": "x",
        }
        assert (await at.chat("hi", **neutral, parallel_tool_calls=True, metadata={"a": "b"})).status_code == 200
        minimal: Any = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
        assert (await at.chat("hi", tools=[minimal])).status_code == 200
        made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
        result = {"role": "tool", "tool_call_id": "1", "content": ""}
        assert (await at.chat("hi", {"role": "assistant", "tool_calls": [made]}, result)).status_code == 200

    run("hello", ask)


def test_contents_may_be_parts_in_both_apis() -> None:
    async def ask(at: Scene) -> None:
        parts: Any = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        reply: Any = {"role": "assistant", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
        assert (await at.chat(parts)).status_code == 200
        assert (await at.chat(user("ab"), reply, parts)).status_code == 200
        [branch] = at.recording.trajectories
        assert [message["content"] for message in branch.messages] == [parts["content"], "hello"] * 2
        flat = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
        items: Any = [{"role": "user", "content": flat}, *message_items(reply), {"role": "user", "content": flat}]
        await at.openai.responses.create(model="m", input=items)
        assert at.recording.trajectories[-1].messages[2]["content"] == parts["content"]
        tokens = [span.tokens for branch in at.recording.trajectories for span in branch.spans]
        assert list(tokens[0]) == RENDERER.render_prompt([user("ab")])

    run("hello", ask)


def message_items(message: Any) -> list[Any]:
    """Return the message as a client of the Responses API sends it back."""
    texts = [{"type": "output_text", "text": part["text"], "annotations": []} for part in message["content"]]
    return [{"type": "message", "id": "1", "role": "assistant", "status": "completed", "content": texts}]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://x", "only an image itself or its data URL is taken here, not 'http://x'"),
        ("/etc/passwd", "only an image itself or its data URL is taken here"),
        ("data:image/png;base64,AAAA", "not an image in one of the formats"),
        (picture(), "has an image, where only text can be read"),
    ],
)
@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_an_image_is_refused_with_a_reason(kind: str, url: str, why: str) -> None:
    async def ask(at: Scene) -> None:
        content: Any = [{"type": kind, "image_url": url}]
        answers = [
            await at.chat({"role": "user", "content": content}),
            await at.http.post(
                f"{at.address.base_url}/responses",
                json={"model": "m", "input": [{"role": "user", "content": content}]},
                headers={"Authorization": f"Bearer {at.address.api_key}"},
            ),
        ]
        for answer in answers:
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]
        assert not at.model.requests

    run("hello", ask)


def test_requested_sampling_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(at: Scene) -> None:
        for _ in range(2):
            assert (await at.chat("hi", temperature=0.2, top_p=1.0)).status_code == 200
        assert {params.distribution.temperature for params in at.model.requests} == {1.0}
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "temperature = 0.2" in warning.getMessage()

    run("hello", ask)
