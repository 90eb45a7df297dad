"""The connections of an endpoint, bounded so that clients without a token can't use up the files of the process.

A connection waits until a request with a valid token has come in, and again once that is answered. One that waits too
long is closed; where there are too many, the one that has waited longest is closed at once. Knows no token.
"""

import asyncio
import logging
import resource

log = logging.getLogger(__name__)

_MOST = 4096
_PATIENCE = 15.0  # seconds until a connection has sent a whole head with a valid token

Client = tuple[str, int]


class Connections:
    """Who is connected. ``most``: by default half of the files that the process may open."""

    def __init__(self, most: int | None = None, patience: float = _PATIENCE) -> None:
        self.most, self.patience = most or _share_of_files(), patience
        self._waiting: dict[Client, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # the longest-waiting first
        self._at_work: dict[Client, asyncio.Transport] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._at_work)

    def opened(self, client: Client, transport: asyncio.Transport) -> None:
        """A client has connected."""
        self._wait(client, transport)
        if len(self) > self.most:
            if not self._warned:
                log.warning("more than %d connections to the endpoint; idle ones are closed", self.most)
                self._warned = True
            self._abort(next(iter(self._waiting)))

    def works(self, client: Client | None) -> None:
        """A request with a valid token has come in."""
        if client in self._waiting:
            self._at_work[client], timer = self._waiting.pop(client)
            timer.cancel()

    def answered(self, client: Client) -> None:
        """The answer has been sent."""
        if (transport := self._at_work.pop(client, None)) is not None:
            self._wait(client, transport)

    def closed(self, client: Client) -> None:
        """The connection has ended."""
        self._at_work.pop(client, None)
        if client in self._waiting:
            self._waiting.pop(client)[1].cancel()

    def _wait(self, client: Client, transport: asyncio.Transport) -> None:
        timer = asyncio.get_running_loop().call_later(self.patience, self._abort, client)
        self._waiting[client] = transport, timer

    def _abort(self, client: Client) -> None:
        transport, timer = self._waiting.pop(client)
        timer.cancel()
        transport.abort()


def _share_of_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2))
