"""The HTTP server of an endpoint: uvicorn with a bounded number of connections."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from whet.endpoint.connections import Connections

_AT_ONCE = 16  # connections accepted at once, before idle ones can be closed
_BACKLOG = 1024  # connections that wait in the kernel


class Server(uvicorn.Server):
    """Serves an application over bounded connections, and leaves signals to the run."""

    def __init__(self, settings: uvicorn.Config, connections: Connections) -> None:
        class Connection(H11Protocol):
            """Reports its state to ``connections``."""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if self.client is None:  # the client has already disconnected
                    transport.abort()
                else:
                    connections.opened(self.client, transport)

            def on_response_complete(self) -> None:
                if self.client is not None:
                    connections.answered(self.client)
                super().on_response_complete()

            def connection_lost(self, exc: Exception | None) -> None:
                if self.client is not None:
                    connections.closed(self.client)
                super().connection_lost(exc)

        settings.http, settings.backlog = Connection, _AT_ONCE
        super().__init__(settings)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # the setting ``backlog`` also bounds how many are accepted at once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
