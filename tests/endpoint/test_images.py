"""Images in requests of all three APIs are parts of messages, which a model with vision reads."""

import asyncio
import json
from typing import Any

import pytest

from tests.tiny_vision import picture, save_tiny_vision
from whet.chat.renderer import Renderer
from whet.core.content import image_urls
from whet.core.types import Message
from whet.endpoint.chat import ChatRequest
from whet.endpoint.conversations import Conversations
from whet.endpoint.messages import MessagesRequest
from whet.endpoint.request import ApiError, Request, read
from whet.endpoint.responses import ResponsesRequest
from whet.engines.base import Completion, SamplingParams
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_tokenizer
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording

URL = picture()
SEEN: list[Any] = [{"type": "image", "url": URL}, {"type": "text", "text": "Which colour?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}


def anthropic(url: str = URL) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}


def asked(kind: type[Request], content: Any, **more: Any) -> list[Message]:
    name = "input" if kind is ResponsesRequest else "messages"
    most = {"max_tokens": 9} if kind is MessagesRequest else {}
    body = {"model": "m", name: [{"role": "user", "content": content}], **most, **more}
    return read(kind, json.dumps(body).encode()).question().messages


@pytest.mark.parametrize(
    ("kind", "image", "text"),
    [
        (ChatRequest, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "text"),
        (ResponsesRequest, {"type": "input_image", "image_url": URL}, "input_text"),
        (MessagesRequest, anthropic(), "text"),
    ],
)
def test_an_image_of_a_user_is_a_part(kind: type[Request], image: Any, text: str) -> None:
    (message,) = asked(kind, [image, {"type": text, "text": "Which colour?"}])
    assert message == {"role": "user", "content": SEEN}


def test_an_image_of_a_tool_is_a_part_in_all_apis() -> None:
    sent = {"model": "m", "messages": [], "max_tokens": 9}
    chat = [
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
    ]
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [anthropic()]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    items = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    first = read(ChatRequest, json.dumps({**sent, "messages": chat}).encode()).question().messages
    second = read(MessagesRequest, json.dumps({**sent, "messages": blocks}).encode()).question().messages
    third = read(ResponsesRequest, json.dumps({"model": "m", "input": items}).encode()).question().messages
    for messages in (first, second, third):
        assert messages[1]["role"] == "tool"
        assert messages[1]["content"] == SEEN[:1]
    assert second[2] == {"role": "user", "content": "And?"}


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        (ChatRequest, [{"type": "image_url"}], "an image with its data URL"),
        (ResponsesRequest, [{"type": "input_image", "file_id": "f1"}], "an image with its data URL"),
        (
            MessagesRequest,
            [{"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}],
            "only an image itself",
        ),
        (MessagesRequest, [anthropic("data:image/png;base64,AAAA")], "not an image in one of the formats"),
        (MessagesRequest, [{"type": "document", "source": {}}], "not a part of type 'document'"),
        (ChatRequest, [{"type": "input_audio", "input_audio": {}}], "not a part of type 'input_audio'"),
    ],
)
def test_what_is_no_image_is_refused(kind: type[Request], content: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        asked(kind, content)
    assert error.value.status == 400


def test_an_image_in_a_reply_is_refused() -> None:
    user = {"role": "user", "content": "x"}
    for kind, image in (
        (ChatRequest, {"type": "image_url", "image_url": {"url": URL}}),
        (ResponsesRequest, {"type": "input_image", "image_url": URL}),
        (MessagesRequest, anthropic()),
    ):
        name = "input" if kind is ResponsesRequest else "messages"
        most = {"max_tokens": 9} if kind is MessagesRequest else {}
        body = {"model": "m", name: [user, {"role": "assistant", "content": [image]}, user], **most}
        with pytest.raises(ApiError, match="must hold text only") as error:
            read(kind, json.dumps(body).encode())
        assert error.value.status == 400


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision(folder)
    model = ModelConfig(path=str(folder), vision="frozen")
    return Renderer(load_tokenizer(model), images=load_images(model))


class Red:
    """A model that replies with the same word always."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokens = [*renderer.encode_text("red"), renderer.stop_token_ids[0]]

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return Completion(self.tokens, [-1.0] * len(self.tokens), (0, 0), "stop")


def test_the_model_gets_the_tokens_of_an_image_and_a_second_call_continues_the_first(renderer: Renderer) -> None:
    async def go() -> None:
        recording = Recording(Red(renderer), renderer, Sampling(max_turns=4), "e", 0)
        conversations = Conversations(recording)
        image = {"type": "image_url", "image_url": {"url": URL}}
        history: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": "Which colour?"}]}]
        for _ in range(2):
            body = {"model": "m", "messages": history}
            question = read(ChatRequest, json.dumps(body).encode()).question()
            answer = await conversations.answer(question, repeated=False)
            history += [
                {"role": "assistant", "content": answer.message["content"]},
                {"role": "user", "content": "Sure?"},
            ]
        [branch] = recording.trajectories
        assert sum(token < 0 for token in branch.tokens) == 4
        assert image_urls(branch.messages) == [URL]
        assert [span.trained for span in branch.spans] == [False, True, False, True]

    asyncio.run(go())
