"""``/v1/messages``, Anthropic's API: its requests and its answers, complete or streamed. Here the content of a message
is a list of blocks; calls are blocks of the assistant, and their results are blocks of the user."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.core.content import Content, Part, text_of
from whet.core.types import Message
from whet.data.messages import read_by
from whet.endpoint.messages_events import MessagesEvents
from whet.endpoint.request import (
    Answer,
    Arguments,
    Body,
    Function,
    Parameters,
    Question,
    Request,
    RequestedSampling,
    Text,
    TextOrParts,
    incoming,
    only,
    sent_content,
    strict_of,
    text_of_reply,
    to_answer,
)

_CHOICES = ({"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": False})


class ThinkingBlock(BaseModel):
    """The reasoning of the model."""

    thinking: str


class ToolUseBlock(BaseModel):
    """A call that the model made."""

    id: str
    name: str
    input: Arguments


class ToolResultBlock(BaseModel):
    """The result of a call. Its text says whether it is an error; ``is_error`` is not shown to the model."""

    tool_use_id: str
    content: TextOrParts = ""


def _kind(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if kind in ("thinking", "tool_use", "tool_result") else "text"


Block = Annotated[
    Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[Content, read_by(lambda block: sent_content([block])), Tag("text")],
    Discriminator(_kind),
]


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Turn(BaseModel):
    """A message of the conversation. Other fields of blocks (citations, cache control) are ignored."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> "Turn":
        foreign = ToolResultBlock if self.role == "assistant" else ThinkingBlock | ToolUseBlock
        if any(isinstance(block, foreign) for block in self.content):
            raise ValueError(f"a message of the {self.role} has a block that only the other side sends")
        for block in self.content:
            if isinstance(block, list) and self.role == "assistant":
                text_of_reply(block)
        return self

    def messages(self) -> Iterator[Message]:
        """Yield whet's form: the results of calls are separate messages."""
        text: Message = {"role": self.role, "content": ""}
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if text["content"]:
                    yield text
                    text = {"role": self.role, "content": ""}
                yield {"role": "tool", "content": _joined(block.content), "tool_call_id": block.tool_use_id}
            elif isinstance(block, ToolUseBlock):
                text.setdefault("tool_calls", []).append(incoming(block.id, block.name, block.input))
            elif isinstance(block, ThinkingBlock):
                text["reasoning_content"] = text.get("reasoning_content", "") + block.thinking
            else:
                text["content"] = _joined(text["content"], block)
        if text["content"] or not any(isinstance(block, ToolResultBlock) for block in self.content):
            yield text


def _joined(*contents: Content) -> Content:
    """Return the contents as one: a text, or parts if there is an image."""
    parts: list[Part] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not any(part["type"] == "image" for part in parts):
        return text_of(parts)
    return [part for part in parts if part["type"] == "image" or part["text"]]


class CustomTool(Function):
    """A function of the client. Tools that Anthropic defines are refused."""

    type: Annotated[JsonValue, only("custom", None)] = None
    parameters: Parameters = Field({}, validation_alias="input_schema")


class Conversation(Body):
    """The part of a request that the model reads; also the body of ``/v1/messages/count_tokens``."""

    messages: list[Turn] = Field(min_length=1)
    system: Text = ""
    tools: list[CustomTool] = Field(default_factory=list)
    tool_choice: Annotated[JsonValue, only(*_CHOICES)] = None
    thinking: dict[str, JsonValue] | None = None
    cache_control: JsonValue = None  # has no effect on the answer

    def question(self) -> Question:
        messages = [message for turn in self.messages for message in turn.messages()]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        tools = [tool.schema_for_template() for tool in self.tools] if self.tool_choice != {"type": "none"} else []
        return Question(to_answer(messages), tools or None)


class MessagesRequest(Conversation, Request):
    """A request; see Anthropic's reference of messages."""

    max_tokens: int = Field(gt=0)
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: JsonValue = None  # this and the following have no effect on the answer
    service_tier: JsonValue = None
    inference_geo: JsonValue = None

    def question(self) -> Question:
        question = super().question()
        question.limit = self.max_tokens
        question.sampling = RequestedSampling(
            self.temperature, self.top_p, self.top_k, stop=tuple(self.stop_sequences), strict=strict_of(self.tools)
        )
        match self.thinking:
            case {"type": "enabled"}:
                question.sampling.thinking = "on"
            case {"type": "disabled"}:
                question.sampling.thinking = "off"
        return question

    def body(self, answer: Answer, renderer: Renderer) -> JsonObject:
        reason, stop = "max_tokens", None
        if answer.complete:
            sampled = renderer.decode(answer.tokens)
            stop = next((text for text in self.stop_sequences if text in sampled), None)
            reason = "stop_sequence" if stop else "tool_use" if answer.message.get("tool_calls") else "end_turn"
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(_blocks(answer.message)),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": len(answer.prompt) - answer.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": answer.cached,
                "output_tokens": len(answer.tokens),
            },
        }

    def events(self, begun: dict[str, object]) -> MessagesEvents:
        return MessagesEvents(begun)


def _blocks(reply: Message) -> Iterator[dict[str, object]]:
    if reasoning := reply.get("reasoning_content"):
        yield {"type": "thinking", "thinking": reasoning, "signature": ""}
    if reply["content"]:
        yield {"type": "text", "text": reply["content"]}
    for call in reply.get("tool_calls", []):
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
