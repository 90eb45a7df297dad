"""An HTTP server that speaks OpenAI's API, in front of the model of a run.

    agent ──bearer token──► Endpoint ──► Conversations, of one episode ──► Session ──► generator
                                    └──► ServedModel (whet serve)      ──► Session ──► generator

It runs in the event loop of the run and listens on loopback unless told otherwise. Each token leads to one episode;
when that has ended, its calls are answered with 410.
"""

import asyncio
import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.chat.renderer import Renderer
from whet.endpoint.connections import Connections
from whet.endpoint.conversations import Answers
from whet.endpoint.request import ApiError
from whet.tasks.base import Address

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from whet.endpoint.http_server import Server

_CLOSING = 5  # seconds that answers in progress may take when it closes
_REMEMBERED = 10_000  # tokens of episodes that have ended


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
        with extra("serve", "the OpenAI API of an endpoint"):
            import uvicorn

            from whet.endpoint.http_server import Server
            from whet.endpoint.routes import Routes
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ConfigError(f"can't listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = listener.getsockname()[1]
        settings = uvicorn.Config(
            Routes(self).application(),
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
        """Stop listening and close all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def until_closed(self) -> None:
        """Wait for the server's end."""
        assert self._serving is not None, "start comes first"
        await asyncio.shield(self._serving)

    def unknown(self, wanted: str) -> ApiError:
        """Return the error for a model that is not served."""
        what = f"the model {wanted!r} does not exist; known: {self.model}"
        return ApiError(404, what, code="model_not_found", param="model")

    def answers_of(self, request: "HttpRequest") -> Answers:
        """Return what answers a request, by its token. Raises ``ApiError`` for a token that is not open."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or (token not in self._open and token not in self._ended):
            raise ApiError(401, "a valid token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        if token not in self._open:
            raise ApiError(410, "the episode of this token has ended", code="episode_ended")
        self._connections.works(request.client)
        return self._open[token]
