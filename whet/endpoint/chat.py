"""``/v1/chat/completions``: its requests and its answers, complete or streamed."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, ValidationInfo, field_validator, model_validator

from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.core.types import Message
from whet.endpoint.chat_events import ChatEvents
from whet.endpoint.request import (
    Answer,
    Arguments,
    Function,
    OpenAIRequest,
    Question,
    RequestedSampling,
    TextOrParts,
    incoming,
    only,
    outgoing,
    strict_of,
    text_of_reply,
    to_answer,
)


class CalledFunction(BaseModel):
    """The function of a call."""

    name: str
    arguments: Arguments


class Call(BaseModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message of the conversation. Other fields of replies that clients send back (annotations, token ids) are
    ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts = ""
    name: str | None = None
    """The name of the tool, in its result."""
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @field_validator("name")
    @classmethod
    def _of_a_tool(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and info.data.get("role") != "tool":
            raise ValueError("names of participants are not supported; leave it out")
        return name

    @model_validator(mode="after")
    def _replies_in_text(self) -> "ChatMessage":
        if self.role == "assistant":
            self.content = text_of_reply(self.content)
        return self

    def message(self) -> Message:
        """Return whet's form of the message."""
        content = self.content
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            calls = [(call.id, call.function) for call in self.tool_calls]
            message["tool_calls"] = [incoming(id, function.name, function.arguments) for id, function in calls]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class Tool(BaseModel):
    """A function, nested as in this API."""

    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    """Settings of a stream."""

    include_usage: bool = False


class ChatRequest(OpenAIRequest):
    """A request; see OpenAI's reference of chat completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = Field(default_factory=list)  # not a tuple, which a strict model makes of no list
    n: Annotated[JsonValue, only(1)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[JsonValue, only(0)] = 0
    return_tokens_as_token_ids: bool = False
    """Name tokens in the log-probs by id (``token_id:57``), like vLLM."""
    stream_options: StreamOptions = StreamOptions()
    response_format: Annotated[JsonValue, only({"type": "text"})] = None
    frequency_penalty: Annotated[JsonValue, only(0)] = 0
    presence_penalty: Annotated[JsonValue, only(0)] = 0
    logit_bias: Annotated[JsonValue, only({})] = None
    modalities: JsonValue = None

    def question(self) -> Question:
        tools = [tool.function.schema_for_template() for tool in self.tools] if self.tool_choice == "auto" else []
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        strict = strict_of(tool.function for tool in self.tools)
        return Question(
            to_answer([message.message() for message in self.messages]),
            tools or None,
            min(limits, default=None),
            RequestedSampling(self.temperature, self.top_p, self.top_k, self.min_p, self.seed, stop, strict),
        )

    def body(self, answer: Answer, renderer: Renderer) -> dict[str, object]:
        reply = answer.message
        calls = [outgoing(call) for call in reply.get("tool_calls", [])]
        message: JsonObject = {"role": "assistant", "content": reply["content"] or (None if calls else "")}
        if reply.get("reasoning_content"):
            message["reasoning_content"] = reply["reasoning_content"]
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ]
        if self.return_token_ids:
            message |= answer.recorded()
        finish = "length" if not answer.complete else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = {
                "content": [self._scored(*pair, renderer) for pair in _pairs(answer)],
                "refusal": None,
            }
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(answer.prompt),
                "completion_tokens": len(answer.tokens),
                "total_tokens": len(answer.prompt) + len(answer.tokens),
                "prompt_tokens_details": {"cached_tokens": answer.cached},
            },
        }

    def _scored(self, token: int, logprob: float, renderer: Renderer) -> dict[str, object]:
        name = f"token_id:{token}" if self.return_tokens_as_token_ids else renderer.text_of(token)
        return {"token": name, "logprob": logprob, "bytes": list(renderer.bytes_of(token)), "top_logprobs": []}

    def events(self, begun: dict[str, object]) -> ChatEvents:
        return ChatEvents(begun, self.stream_options.include_usage)


def _pairs(answer: Answer) -> Iterator[tuple[int, float]]:
    return zip(answer.tokens, answer.logprobs, strict=True)
