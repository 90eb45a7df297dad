"""The connections of an endpoint, bounded so that clients without a token can't use up the files of the process, and
the bodies of requests, bounded in length and time.

A connection is idle until it has sent a request with a valid token, and again after the answer. It is closed when it is
idle for too long; if there are too many connections, the longest idle one is closed at once. Tokens are checked
elsewhere.
"""

import asyncio
import logging
import resource
from typing import TYPE_CHECKING

from whet.endpoint.request import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 4096
_PATIENCE = 15.0  # seconds for a connection to send a complete head with a valid token

Client = tuple[str, int]


class Connections:
    """The open connections. ``limit``: by default half of the files that the process may open."""

    def __init__(self, limit: int | None = None, patience: float = _PATIENCE) -> None:
        self.limit, self.patience = limit or _share_of_files(), patience
        self._idle: dict[Client, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # the longest idle first
        self._busy: dict[Client, asyncio.Transport] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def opened(self, client: Client, transport: asyncio.Transport) -> None:
        """Record that a client has connected."""
        self._set_idle(client, transport)
        if len(self) > self.limit:
            if not self._warned:
                log.warning("more than %d connections to the endpoint; idle ones are closed", self.limit)
                self._warned = True
            self._abort(next(iter(self._idle)))

    def authorized(self, client: Client | None) -> None:
        """Record that a client has sent a request with a valid token."""
        if client in self._idle:
            self._busy[client], timer = self._idle.pop(client)
            timer.cancel()

    def answered(self, client: Client) -> None:
        """Record that a client has got its answer."""
        if (transport := self._busy.pop(client, None)) is not None:
            self._set_idle(client, transport)

    def drop(self, client: Client) -> None:
        """Close a connection at once, with what was not sent."""
        if (transport := self._busy.pop(client, None)) is not None:
            transport.abort()

    def closed(self, client: Client) -> None:
        """Record that a connection has ended."""
        self._busy.pop(client, None)
        if client in self._idle:
            self._idle.pop(client)[1].cancel()

    def _set_idle(self, client: Client, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()

        def expire() -> None:
            if self._idle.get(client) is idle:
                self._abort(client)

        # In the turn of the loop after that, so that a request which has arrived by then is read before, even if the
        # loop is late.
        idle = transport, loop.call_later(self.patience, loop.call_soon, expire)
        self._idle[client] = idle

    def _abort(self, client: Client) -> None:
        transport, timer = self._idle.pop(client)
        timer.cancel()
        transport.abort()


def _share_of_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_CONNECTIONS, soft // 2))


LARGEST = 16 * 2**20  # bytes
_UPLOAD = 60.0  # seconds


async def read_body(request: "Request") -> bytes:
    """Return the body. Raises ``ApiError`` if it is too long or takes too long."""
    too_large = ApiError(413, f"the request has more than {LARGEST:,} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > LARGEST:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request took more than {_UPLOAD:g} s to arrive") from None
    return bytes(body)
