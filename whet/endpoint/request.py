"""The common part of the APIs: the question in a request, the answer to it, and errors.

Unsupported parameters are refused by name, never ignored: an agent must not be trained under other settings than its
own. Independent of HTTP.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from whet.base.errors import DataError, WhetError
from whet.base.strict_json import JsonObject
from whet.chat.calls import checked_arguments, match_results
from whet.chat.renderer import Renderer
from whet.core.content import Content, ImagePart, content_of, text_of
from whet.core.types import Message, ToolCall
from whet.data.messages import read_by
from whet.fetch.images import read_image, source_of

if TYPE_CHECKING:
    from whet.endpoint.events import Events

R = TypeVar("R", bound=BaseModel)

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An error with an HTTP status. ``code`` and ``param`` are parts of OpenAI's format."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def api_error(error: Exception) -> ApiError:
    """Return the error of a call as the client gets it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DataError):
        return ApiError(400, str(error))
    log.error("a call of the endpoint failed", exc_info=error)
    return ApiError(500, str(error) if isinstance(error, WhetError) else type(error).__name__)


def openai_error(error: ApiError) -> dict[str, object]:
    """Return the error in OpenAI's format."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


@dataclass(slots=True)
class RequestedSampling:
    """The sampling settings in a request; None for absent ones."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    strict: bool | None = None  # True: arguments of calls must match their schemas
    thinking: Literal["on", "off"] | None = None


@dataclass(slots=True)
class Question:
    """A conversation that needs a reply."""

    messages: list[Message]
    tools: list[JsonObject] | None = None
    limit: int | None = None  # maximal number of tokens of the reply
    sampling: RequestedSampling = field(default_factory=RequestedSampling)


@dataclass(slots=True)
class Answer:
    """The reply, with its tokens and log-probs."""

    message: Message
    prompt: Sequence[int]
    tokens: list[int]
    logprobs: list[float]  # [len(tokens)]
    complete: bool = True  # False: cut at the limit
    cached: int = 0  # tokens of the prompt that were in the prefix cache
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def recorded(self) -> dict[str, object]:
        """Return token ids and log-probs under the names of NVIDIA's NeMo Gym."""
        return {
            "prompt_token_ids": list(self.prompt),
            "generation_token_ids": self.tokens,
            "generation_log_probs": self.logprobs,
        }


def only(*supported: object) -> AfterValidator:
    """Return a validator that refuses all other values of a parameter."""

    def check(value: object) -> object:
        if value not in supported:
            choices = " or ".join(json.dumps(choice) for choice in supported)
            raise ValueError(f"{json.dumps(value)[:40]} is not supported, only {choices}")
        return value

    return AfterValidator(check)


def sent_content(value: object) -> Content:
    """Return the content that a client sent. Raises ``ValueError`` for an image that is damaged, or not a data URL."""
    return "" if value is None else content_of(value, _image)


def _image(part: Mapping[str, object]) -> ImagePart:
    source = source_of(part)
    if not isinstance(source, str):
        raise ValueError("must hold an image with its data URL")
    try:
        return {"type": "image", "url": read_image(source)}  # of the request alone: no file, no address
    except WhetError as problem:
        raise ValueError(str(problem)) from None


TextOrParts = Annotated[Content, read_by(sent_content)]  # a text, or parts of texts and images
Text = Annotated[str, read_by(lambda value: text_of("" if value is None else content_of(value)))]  # parts are joined
Arguments = Annotated[dict[str, Any], BeforeValidator(checked_arguments)]
Parameters = Annotated[
    dict[str, Any], BeforeValidator(lambda schema: checked_arguments({} if schema is None else schema))
]


class Function(BaseModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: Annotated[str, BeforeValidator(lambda text: "" if text is None else text)] = ""
    parameters: Parameters = {}
    strict: bool | None = None
    """Sampling never constrains arguments."""

    def schema_for_template(self) -> dict[str, object]:
        """Return the function in the format of chat templates."""
        return {"type": "function", "function": self.model_dump(include={"name", "description", "parameters"})}


class Body(BaseModel):
    """A body that names a model. Unknown parameters are refused; null ones count as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class Request(Body, ABC):
    """Base of the requests of all APIs."""

    stream: bool = False

    @abstractmethod
    def question(self) -> Question:
        """Return the question in the request."""

    @abstractmethod
    def body(self, answer: Answer, renderer: Renderer) -> dict[str, object]:
        """Return the complete answer as JSON. ``renderer`` gives the text of tokens."""

    @abstractmethod
    def events(self, begun: dict[str, object]) -> "Events":
        """Return the events of a streamed answer. ``begun``: the body of the answer without its contents."""


class OpenAIRequest(Request):
    """Base of the requests of OpenAI's APIs."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    tool_choice: Annotated[JsonValue, only("auto", "none")] = "auto"
    parallel_tool_calls: Annotated[JsonValue, only(True)] = True
    return_token_ids: bool = False
    """Add the token ids and log-probs of prompt and reply to the message."""
    metadata: JsonValue = None  # this and the following have no effect on the answer
    user: JsonValue = None
    store: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None
    prompt_cache_retention: JsonValue = None


def read(kind: type[R], body: bytes) -> R:
    """Return the request. Raises ``ApiError`` that names an invalid or unsupported parameter."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter") from None
        why = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param or 'the body'}: {why}", param=param) from None


def outgoing(call: ToolCall) -> tuple[str, str, str]:
    """Return id, name and arguments (JSON) of a call."""
    return call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)


def incoming(id: str, name: str, arguments: dict[str, object]) -> ToolCall:
    """Return a call that a client sent back in whet's form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of_reply(content: Content) -> str:
    """Return the content of a reply, which the model wrote. Raises ``ValueError`` for one with an image."""
    if not isinstance(content, str) and any(part["type"] == "image" for part in content):
        raise ValueError("a message of the assistant must hold text only, not an image")
    return text_of(content)


def to_answer(messages: list[Message]) -> list[Message]:
    """Return the messages with results matched to calls. Raises ``ApiError`` if no message needs a reply."""
    if not messages or messages[-1]["role"] == "assistant":
        raise ApiError(400, "messages: the last one must not be the assistant's", param="messages")
    return match_results(messages)


def strict_of(tools: Iterable[Function]) -> bool | None:
    """Return True if a client requires arguments that match the schema of any tool, else None."""
    return True if any(tool.strict for tool in tools) else None
