"""An HTTP server that speaks OpenAI's API, in front of the model of a run.

    agent ──bearer token──► Endpoint ──► Conversations, of one episode ──► Session ──► generator
                                    └──► ServedModel (whet serve)      ──► Session ──► generator

It runs in the event loop of the run and listens on loopback unless told otherwise. Each token leads to one episode;
when that has ended, its calls are answered with 410.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from whet.base.errors import ConfigError, DataError, WhetError
from whet.chat.renderer import Renderer
from whet.core.types import Message
from whet.endpoint.body import read_body
from whet.endpoint.chat import ChatMessage, ChatRequest, Tool
from whet.endpoint.connections import Connections, Server
from whet.endpoint.conversations import Answers
from whet.endpoint.request import ApiError, Request, read
from whet.endpoint.responses import ResponsesRequest
from whet.tasks.base import Address

T = TypeVar("T")

log = logging.getLogger(__name__)

_CLOSING = 5  # seconds that answers under way may take when it closes
_REMEMBERED = 10_000  # tokens of episodes that have ended


class Tokenize(BaseModel):
    """A text or a conversation to be counted, as vLLM's route of this name takes it."""

    prompt: str | None = None
    messages: list[ChatMessage] = []
    tools: list[Tool] = []


class Endpoint:
    """Starts with ``start``. ``model`` is the one name that requests may give; None: they may give any."""

    def __init__(self, renderer: Renderer, *, model: str | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.renderer, self.model, self.host, self.port = renderer, model, host, port
        self._open: dict[str, Answers] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._server: Server | None = None
        self._connections = Connections()
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address that clients take as their ``base_url``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> None:
        """Listen, unless it does already. Needs a running event loop. Raises ``ConfigError`` where the address can't be
        had."""
        if self._serving is not None:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ConfigError(f"can't listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = listener.getsockname()[1]
        settings = uvicorn.Config(
            self._application(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSING,
        )
        self._server = Server(settings, self._connections)
        self._serving = asyncio.create_task(self._server.serve([listener]))

    @contextlib.contextmanager
    def open(self, answers: Answers, token: str | None = None) -> Iterator[Address]:
        """Answer the calls that come with a token, by default a random one, while the context is open."""
        token = token or secrets.token_urlsafe(32)
        self._open[token] = answers
        try:
            yield Address(self.url, token)
        finally:
            del self._open[token]
            self._ended.append(token)

    async def close(self) -> None:
        """Stop listening and let go of all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def until_closed(self) -> None:
        """Wait for the server's end."""
        assert self._serving is not None, "start comes first"
        await asyncio.shield(self._serving)

    def _application(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", _guarded(partial(self._ask, ChatRequest)), methods=["POST"]),
            Route("/v1/responses", _guarded(partial(self._ask, ResponsesRequest)), methods=["POST"]),
            Route("/v1/models", _guarded(self._models)),
            Route("/v1/models/{name:path}", _guarded(self._models)),
            Route("/tokenize", _guarded(self._tokenize), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    async def _ask(self, kind: type[Request], request: HttpRequest) -> Response:
        answers = self._answers(request)
        asked = read(kind, await read_body(request))
        if self.model is not None and asked.model != self.model:
            raise self._unknown(asked.model)
        repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
        answer = await _while_connected(request, answers.answer(asked.question(), repeated))
        body = asked.body(answer, self.renderer.decode)
        if not asked.stream:
            return JSONResponse(body)
        return StreamingResponse(asked.stream_of(body), media_type="text/event-stream")

    async def _models(self, request: HttpRequest) -> Response:
        self._answers(request)
        wanted = request.path_params.get("name")
        if self.model is not None and wanted not in (None, self.model):
            raise self._unknown(wanted)
        model = {"id": self.model or wanted or "policy", "object": "model", "created": 0, "owned_by": "whet"}
        if wanted is not None:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: HttpRequest) -> Response:
        longest = self._answers(request).longest
        asked = read(Tokenize, await read_body(request))
        tools = [tool.function.schema_for_template() for tool in asked.tools]
        text: Message = {"role": "user", "content": asked.prompt or ""}
        messages = [one.message() for one in asked.messages] if asked.prompt is None else [text]
        if self.renderer.longer_than(longest, messages, tools):
            raise ApiError(400, f"that has more than {longest} tokens, the most that the model can be shown")
        if asked.prompt is not None:
            tokens = self.renderer.encode_text(asked.prompt)
        else:
            tokens = self.renderer.render_prompt(messages, tools or None)
        return JSONResponse({"count": len(tokens), "tokens": tokens})

    def _unknown(self, wanted: str) -> ApiError:
        what = f"the model {wanted!r} does not exist; known: {self.model}"
        return ApiError(404, what, code="model_not_found", param="model")

    def _answers(self, request: HttpRequest) -> Answers:
        """Find who answers, by the token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or (token not in self._open and token not in self._ended):
            raise ApiError(401, "a valid token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        if token not in self._open:
            raise ApiError(410, "the episode of this token has ended", code="episode_ended")
        self._connections.works(request.client)
        return self._open[token]


async def _while_connected(request: HttpRequest, answering: Coroutine[Any, Any, T]) -> T:
    """Return the answer; cancel it where the client has gone. Raises ``ClientDisconnect``."""
    answer, gone = asyncio.create_task(answering), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _guarded(route: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Turn errors into answers."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await route(request)
        except ApiError as error:
            return _refused(error)
        except DataError as error:
            return _refused(ApiError(400, str(error)))
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        except Exception as error:
            log.exception("a call of the endpoint failed")
            return _refused(ApiError(500, str(error) if isinstance(error, WhetError) else type(error).__name__))

    return answer


def _refused(error: ApiError) -> Response:
    headers = {"x-should-retry": "false"}  # which OpenAI's libraries obey
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error.body, error.status, headers)


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return _refused(ApiError(status, f"{request.method} {request.url.path} is not served here"))
