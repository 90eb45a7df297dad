"""An HTTP server that speaks OpenAI's and Anthropic's APIs, in front of the model of a run.

    agent ──bearer token──► Endpoint ──► Conversations, of one episode ──► Session ──► generator
                                    └──► ServedModel (whet serve)      ──► Session ──► generator

It runs in the event loop of the run and listens where ``EndpointConfig`` says, by default on loopback. Each token
belongs to one episode; after the end of the episode, its calls are answered with 410.
"""

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.base.listening import listen
from whet.chat.renderer import Renderer
from whet.endpoint.config import EndpointConfig
from whet.endpoint.connections import Connections
from whet.endpoint.conversations import Responder
from whet.endpoint.gym_agents import ROLLOUT
from whet.endpoint.request import ApiError
from whet.tasks.base import Address

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from whet.endpoint.http_server import Server

_CLOSING = 5  # seconds for answers in progress at the close
_REMEMBERED = 10_000  # number of tokens of ended episodes that are remembered


class Endpoint:
    """An HTTP server, started by ``start``. ``model``: the only model name that requests may use; None: any name."""

    def __init__(self, renderer: Renderer, config: EndpointConfig | None = None, *, model: str | None = None) -> None:
        self.renderer, self.config, self.model = renderer, config or EndpointConfig(), model
        self.port = self.config.port  # after the start, never 0
        self.ignored: set[str] = set()  # names of settings that agents request and the recipe decides
        self._open: dict[str, Responder] = {}
        self._calls: Counter[Responder] = Counter()  # in flight
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._server: Server | None = None
        self._connections = Connections()
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address for clients, their ``base_url``."""
        return f"{self.config.url}:{self.port}/v1"

    def start(self) -> None:
        """Start listening, unless it already does. Needs a running event loop. Raises ``ConfigError`` if it can't
        listen at the address, or read the certificate."""
        if self._serving is not None:
            return
        with extra("serve", "the OpenAI API of an endpoint"):
            import uvicorn

            from whet.endpoint.http_server import Server
            from whet.endpoint.routes import Routes
        host, certificate, key = self.config.host, self.config.certificate, self.config.key
        settings = uvicorn.Config(
            Routes(self).application(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSING,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = Server(settings, self._connections)
        try:
            settings.load()
        except OSError as error:  # also of TLS
            raise ConfigError(f"can't use {certificate} with {key} for TLS: {error.strerror or error}") from None
        listener = listen(host, self.port)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]))

    @contextlib.contextmanager
    def open(self, responder: Responder, token: str | None = None) -> Iterator[Address]:
        """Answer the calls with a token, by default a random one, while the context is open."""
        token = token or secrets.token_hex(32)  # NeMo Gym takes a word of letters and digits
        self._open[token] = responder
        try:
            yield Address(self.url, token)
        finally:
            del self._open[token]
            self._ended.append(token)

    @contextlib.contextmanager
    def call(self, responder: Responder) -> Iterator[None]:
        """Count a call while the context is open. Raises ``ApiError`` if there are too many."""
        most = self.config.calls
        if most is not None and self._calls[responder] >= most:
            raise ApiError(429, f"more than {most} calls of this episode at the same time", code="too_many_calls")
        self._calls[responder] += 1
        try:
            yield
        finally:
            self._calls[responder] -= 1
            if not self._calls[responder]:
                del self._calls[responder]

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def until_closed(self) -> None:
        """Wait until the server has ended."""
        assert self._serving is not None, "the endpoint was not started"
        await asyncio.shield(self._serving)

    def responder(self, request: "HttpRequest") -> Responder:
        """Return the responder of a request's token. Raises ``ApiError`` for an unknown token or an ended episode."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key"), bearer if scheme.lower() == "bearer" else None]
        if (rollout := request.path_params.get(ROLLOUT)) is not None:
            given = [rollout]  # the keys of NeMo Gym's agents are placeholders
        token = next((token for token in given if token in self._open), None)
        if token is None:
            if any(token in self._ended for token in given):
                raise ApiError(410, "the episode of this token has ended", code="episode_ended")
            why = "the request needs a valid token, as Authorization: Bearer TOKEN or x-api-key: TOKEN"
            raise ApiError(401, why, code="invalid_api_key")
        self._connections.authorized(request.client)
        return self._open[token]
