"""The HTTP routes of an endpoint: they read requests, pass them to the responder, and return answers and errors."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.core.types import Message
from whet.endpoint.chat import ChatMessage, ChatRequest, Tool
from whet.endpoint.connections import read_body
from whet.endpoint.conversations import check_tools
from whet.endpoint.gym_agents import PREFIXES, ROLLOUT, GymResponder, GymResponsesRequest
from whet.endpoint.messages import Conversation, MessagesRequest
from whet.endpoint.messages_events import anthropic_error
from whet.endpoint.request import ApiError, Request, api_error, openai_error, read
from whet.endpoint.responses import ResponsesRequest
from whet.endpoint.streaming import AnswerStream

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint

T = TypeVar("T")


class Tokenize(BaseModel):
    """A text or a conversation to tokenize, in the format of vLLM's route of this name."""

    prompt: str | None = None
    messages: list[ChatMessage] = []
    tools: list[Tool] = []


class Routes:
    """The routes of one endpoint, as an ASGI application: ``Routes(endpoint).application()``."""

    def __init__(self, endpoint: "Endpoint") -> None:
        self._endpoint = endpoint

    def application(self) -> Starlette:
        apis: dict[str, type[Request]] = {
            "/v1/chat/completions": ChatRequest,
            "/v1/responses": ResponsesRequest,
            "/v1/messages": MessagesRequest,
        }
        gym = apis | {"/v1/responses": GymResponsesRequest}
        routes = [
            *self._asking("", apis),
            *(route for prefix in PREFIXES for route in self._asking(prefix, gym)),
            Route("/v1/messages/count_tokens", _guarded(self._count), methods=["POST"]),
            Route("/v1/models", _guarded(self._models)),
            Route("/v1/models/{name:path}", _guarded(self._models)),
            Route("/tokenize", _guarded(self._tokenize), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    def _asking(self, prefix: str, apis: dict[str, type[Request]]) -> list[Route]:
        return [
            Route(prefix + path, _guarded(partial(self._ask, kind)), methods=["POST"]) for path, kind in apis.items()
        ]

    async def _ask(self, kind: type[Request], request: HttpRequest) -> Response:
        responder = self._endpoint.responder(request)
        renderer = self._endpoint.renderer
        with contextlib.ExitStack() as counted:
            counted.enter_context(self._endpoint.call(responder))
            call = read(kind, await read_body(request))
            self._check_model(call.model)
            repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
            if ROLLOUT in request.path_params:
                responder = GymResponder(responder)
            question = call.question()
            if not call.stream:
                answer = await _while_connected(request, responder.answer(question, repeated))
                return JSONResponse(call.body(answer, renderer))
            stream = AnswerStream(call, partial(responder.answer, question, repeated), renderer)
            try:
                await _while_connected(request, stream.begun())
            except BaseException:
                await stream.close()
                raise
            stream.counted = counted.pop_all()
            return stream

    async def _models(self, request: HttpRequest) -> Response:
        self._endpoint.responder(request)
        if (name := request.path_params.get("name")) is not None:
            self._check_model(name)
        id = self._endpoint.model or name or "policy"
        model = {"id": id, "object": "model", "created": 0, "owned_by": "whet"}
        model |= {"type": "model", "display_name": id, "created_at": "1970-01-01T00:00:00Z"}  # for Anthropic's client
        if name is not None:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": id, "last_id": id})

    def _check_model(self, name: str) -> None:
        if self._endpoint.model is not None and name != self._endpoint.model:
            message = f"the model {name!r} does not exist; this endpoint serves {self._endpoint.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _count(self, request: HttpRequest) -> Response:
        """Answer how many tokens a conversation of Anthropic's API has."""
        longest = self._endpoint.responder(request).longest
        content = read(Conversation, await read_body(request))
        self._check_model(content.model)
        question = content.question()
        self._check_length(longest, question.messages, question.tools)
        check_tools(self._endpoint.renderer, question.tools)
        tokens = self._endpoint.renderer.render_prompt(question.messages, question.tools)
        return JSONResponse({"input_tokens": len(tokens)})

    async def _tokenize(self, request: HttpRequest) -> Response:
        longest = self._endpoint.responder(request).longest
        content = read(Tokenize, await read_body(request))
        tools = [tool.function.schema_for_template() for tool in content.tools]
        text: Message = {"role": "user", "content": content.prompt or ""}
        messages = [message.message() for message in content.messages] if content.prompt is None else [text]
        self._check_length(longest, messages, tools)
        if content.prompt is not None:
            tokens = self._endpoint.renderer.encode_text(content.prompt)
        else:
            check_tools(self._endpoint.renderer, tools)
            tokens = self._endpoint.renderer.render_prompt(messages, tools or None)
        return JSONResponse({"count": len(tokens), "tokens": tokens})

    def _check_length(self, longest: int, messages: list[Message], tools: list[dict[str, object]] | None) -> None:
        if self._endpoint.renderer.longer_than(longest, messages, tools):
            raise ApiError(400, f"the text has more than {longest} tokens, the maximum of the model")


async def _while_connected(request: HttpRequest, answering: Coroutine[object, object, T]) -> T:
    """Return the answer; cancel it if the client disconnects. Raises ``ClientDisconnect``."""
    answer, disconnected = asyncio.create_task(answering), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        disconnected.cancel()
        await asyncio.gather(answer, disconnected, return_exceptions=True)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _guarded(route: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return the route with errors as responses."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await route(request)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected
        except Exception as error:
            return _refused(request, api_error(error))

    return answer


def _refused(request: HttpRequest, error: ApiError) -> Response:
    headers = {"x-should-retry": "false"}  # which both companies' libraries obey
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return JSONResponse(anthropic_error(error) if anthropic else openai_error(error), error.status, headers)


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return _refused(request, ApiError(status, f"{request.method} {request.url.path} is not served here"))
