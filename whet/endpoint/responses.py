"""``/v1/responses``: its requests and its answers, complete or streamed. In this API a conversation is a list of items;
a reply of the model consists of one or more of them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.core.content import Content
from whet.core.types import Message
from whet.endpoint.request import (
    Answer,
    Arguments,
    Function,
    OpenAIRequest,
    Question,
    RequestedSampling,
    Text,
    TextOrParts,
    incoming,
    only,
    outgoing,
    strict_of,
    text_of_reply,
    to_answer,
)
from whet.endpoint.responses_events import ResponsesEvents, message_item, reasoning_item


class MessageItem(BaseModel):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrParts

    @model_validator(mode="after")
    def _replies_in_text(self) -> "MessageItem":
        if self.role == "assistant":
            self.content = text_of_reply(self.content)
        return self


class CallItem(BaseModel):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: Arguments


class ResultItem(BaseModel):
    """The result of a call."""

    call_id: str
    output: TextOrParts


class ReasoningItem(BaseModel):
    """The reasoning of the model."""

    content: Text = ""


def _kind(item: object) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FlatTool(Function):
    """A function, flat as in this API."""

    type: Literal["function"]


class ResponsesRequest(OpenAIRequest):
    """A request; see OpenAI's reference of responses."""

    input: Annotated[list[Item], BeforeValidator(_as_items)]
    instructions: str | None = None
    tools: list[FlatTool] = Field(default_factory=list)
    max_output_tokens: int | None = Field(None, gt=0)
    top_logprobs: Annotated[JsonValue, only(0)] = 0
    text: Annotated[JsonValue, only({}, {"format": {"type": "text"}}, {"format": None})] = None
    truncation: Annotated[JsonValue, only("disabled")] = "disabled"
    background: Annotated[JsonValue, only(False)] = False
    include: JsonValue = None
    stream_options: JsonValue = None

    def question(self) -> Question:
        tools = [tool.schema_for_template() for tool in self.tools] if self.tool_choice == "auto" else []
        messages = _messages(self.input)
        if self.instructions:
            messages.insert(0, _message("system", self.instructions))
        sampling = RequestedSampling(self.temperature, self.top_p, self.top_k, self.min_p, strict=strict_of(self.tools))
        return Question(to_answer(messages), tools or None, self.max_output_tokens, sampling)

    def body(self, answer: Answer, renderer: Renderer) -> JsonObject:
        status = "completed" if answer.complete else "incomplete"
        output = list(_items(answer, status))
        if self.return_token_ids:
            output[-1] |= answer.recorded()
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None if answer.complete else {"reason": "max_output_tokens"},
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": self.temperature,
            "tool_choice": self.tool_choice,
            "tools": [tool.model_dump() for tool in self.tools],
            "top_p": self.top_p,
            "usage": {
                "input_tokens": len(answer.prompt),
                "input_tokens_details": {"cached_tokens": answer.cached},
                "output_tokens": len(answer.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(answer.prompt) + len(answer.tokens),
            },
        }

    def events(self, begun: dict[str, object]) -> ResponsesEvents:
        return ResponsesEvents(begun)


def _message(role: str, content: Content) -> Message:
    return {"role": "system" if role == "developer" else role, "content": content}


def _messages(items: list[Any]) -> list[Message]:
    """Join the items of each reply of the model: its reasoning, its text, its calls."""
    messages: list[Message] = []
    replying = False  # the last message is a reply that may continue
    for item in items:
        by_model = not isinstance(item, ResultItem) and (not isinstance(item, MessageItem) or item.role == "assistant")
        if not by_model:
            role = "tool" if isinstance(item, ResultItem) else item.role
            messages.append(_message(role, item.output if isinstance(item, ResultItem) else item.content))
            if isinstance(item, ResultItem):
                messages[-1]["tool_call_id"] = item.call_id
        else:
            if not replying or isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and _full(messages)):
                messages.append(_message("assistant", ""))
            reply = messages[-1]
            if isinstance(item, CallItem):
                reply.setdefault("tool_calls", []).append(incoming(item.call_id, item.name, item.arguments))
            elif isinstance(item, ReasoningItem):
                reply["reasoning_content"] = item.content
            else:
                reply["content"] = item.content
        replying = by_model
    return messages


def _full(messages: list[Message]) -> bool:
    return bool(messages[-1]["content"] or messages[-1].get("tool_calls"))


def _items(answer: Answer, status: str) -> Iterator[dict[str, object]]:
    reply = answer.message
    calls = reply.get("tool_calls", [])
    if reasoning := reply.get("reasoning_content"):
        yield reasoning_item(answer.id, reasoning)
    if reply["content"] or not calls:
        yield message_item(answer.id, str(reply["content"]), status)
    for number, call in enumerate(calls):
        id, name, arguments = outgoing(call)
        common = {"id": f"fc_{answer.id}_{number}", "status": status}
        yield {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, **common}
