"""The link of a runtime on another machine, whose server can't reach the run: the run opens each connection.

    run                                                server
     └── POST /link, with the key of a runtime   ──▶   waits for a connection from inside the runtime
     ◀── 101, then the bytes of that connection  ───   both ways

Who waits for whom: the run has one connection waiting at any time, and opens the next when that is taken. A connection
from inside waits seconds for one of the run.
"""

import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from whet.shells.links import Carrier, Link, end_connection

log = logging.getLogger(__name__)

_TAKEN = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: whet-link\r\n\r\n"
_WAIT_S = 30.0  # seconds in which a run opens a further connection


class WaitingConnections:
    """The server's side: connections of a run, each for one connection from inside a runtime."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        self._waiting: queue.Queue[socket.socket] = queue.Queue()
        self._closed = False

    def add(self, connection: socket.socket) -> None:
        self._waiting.put(connection)
        if self._closed:
            self.close()

    def take(self) -> socket.socket:
        """Return a connection to the run; a ``Link``. Raises ``OSError``."""
        try:
            connection = self._waiting.get(timeout=_WAIT_S)
        except queue.Empty:
            raise TimeoutError("the run opened no connection") from None
        connection.sendall(_TAKEN)
        return connection

    def close(self) -> None:
        """End the connections that wait."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().close()


class Tunnel:
    """The run's side: carries what comes from inside a runtime to ``link`` until it is closed."""

    def __init__(self, ask: Callable[[], socket.socket], link: Link) -> None:
        """``ask`` opens a connection to the server and sends ``POST /link``."""
        self._ask, self._waiting = ask, socket.socket()
        self._closed, self._changed = False, threading.Lock()
        self._carrier = Carrier(self._take, link)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            end_connection(self._waiting)
        self._carrier.close()

    def _take(self) -> socket.socket:
        connection = self._ask()
        with self._changed:
            if self._closed:
                connection.close()
                raise OSError("the runtime is closed")
            self._waiting = connection
        connection.settimeout(None)  # an agent may think for any time before it calls
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)  # a longer piece could hold bytes from inside
            if not byte:
                connection.close()
                raise OSError("the server closed the runtime")
            head += byte
        if head != _TAKEN:
            connection.close()
            log.warning("the server of shells refuses the link of a runtime: %s", head[:100].decode("latin-1"))
            raise OSError("the server refuses the link")
        return connection
