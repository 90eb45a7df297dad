"""The one way out of a runtime: connections to a port of loopback inside are carried to what its owner opens.

    a command ── 127.0.0.1:LINK_PORT ──▶ a listening socket that the owner holds ── a thread each ──▶ ``link()``

A runtime without a link has no network at all; one with a link has nothing but this port. Who waits for whom: a
connection lasts until one of its sides ends it, or ``close``; what is sent must be taken within a minute.
"""

import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from whet.base.errors import WhetError

LINK_PORT = 4180
"""The port on 127.0.0.1 inside a runtime that has a link."""

Link = Callable[[], socket.socket]
"""Opens one connection to the place behind the link; blocks. Raises ``OSError`` or ``WhetError``."""

_PIECE = 1 << 16
_CONNECT_S = 15.0  # seconds for a connection to the place behind the link
_SEND_S = 60.0  # seconds in which the other side takes a piece
_MOST = 64  # connections of one runtime at the same time; further ones wait


def link_to(url: str) -> Link:
    """Return the link to the server of a URL, encrypted if it begins with https."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def connect() -> socket.socket:
        connection = socket.create_connection((host, port), _CONNECT_S)
        if parts.scheme == "https":
            return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
        return connection

    return connect


class Carrier:
    """Carries connections from inside a runtime until it is closed, each on a thread."""

    def __init__(self, take: Callable[[], socket.socket], link: Link) -> None:
        """``take`` blocks for the next connection from inside; it raises ``OSError`` when there will be none."""
        self._link, self._room = link, threading.Semaphore(_MOST)
        self._open, self._closed, self._changed = set[socket.socket](), False, threading.Lock()
        threading.Thread(target=self._run, args=(take,), name="whet-link", daemon=True).start()

    def close(self) -> None:
        """End all connections. ``take`` must end, too."""
        with self._changed:
            self._closed, ended = True, list(self._open)
        for connection in ended:
            end_connection(connection)

    def _run(self, take: Callable[[], socket.socket]) -> None:
        while not self._closed:
            self._room.acquire()
            try:
                inside = take()
            except (OSError, WhetError):
                return
            threading.Thread(target=self._carry, args=(inside,), name="whet-link", daemon=True).start()

    def _carry(self, inside: socket.socket) -> None:
        try:
            with suppress(OSError, WhetError), inside:
                self._keep(inside)
                with self._link() as outside:
                    self._keep(outside)
                    try:
                        carry(inside, outside)
                    finally:
                        self._forget(outside)
        finally:
            self._forget(inside)
            self._room.release()

    def _keep(self, connection: socket.socket) -> None:
        """Have ``close`` end a connection. Raises ``OSError`` if it was called already."""
        with self._changed:
            if self._closed:
                raise OSError("the runtime is closed")
            self._open.add(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.discard(connection)


def accepting(listener: socket.socket, link: Link) -> Callable[[], None]:
    """Carry the connections that a listening socket takes. Return the function that ends this, and closes it."""
    carrier = Carrier(lambda: listener.accept()[0], link)

    def close() -> None:
        end_connection(listener)  # wakes the thread that accepts
        listener.close()
        carrier.close()

    return close


def carry(inside: socket.socket, outside: socket.socket) -> None:
    """Send what comes from each of two connections to the other, until one of them ends. Raises ``OSError``."""
    with selectors.DefaultSelector() as waiting:
        for end, far in ((inside, outside), (outside, inside)):
            end.settimeout(_SEND_S)
            waiting.register(end, selectors.EVENT_READ, (end, far))
        while True:
            for end, far in [key.data for key, _ in waiting.select()]:
                more = True
                while more:
                    data = end.recv(_PIECE)
                    if not data:
                        return
                    far.sendall(data)
                    more = isinstance(end, ssl.SSLSocket) and end.pending() > 0  # bytes that a selector can't see


def end_connection(connection: socket.socket) -> None:
    """End a connection for both sides, and for a thread that waits for it."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # of the system's socket, also below TLS
