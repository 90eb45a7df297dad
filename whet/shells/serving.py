"""The server of ``whet shells``: opens runtimes for runs on other machines.

Each connection has a thread and at most one runtime, which is closed when the connection ends
(``serving_connection.py``). A request is the name of a method, a line of JSON and bytes; see ``whet.shells.remote`` for
the other side.
"""

import logging
import socket
import ssl
import threading
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Annotated

from pydantic import Field

from whet.base.errors import ConfigError
from whet.base.listening import listen, reach
from whet.config import Component, Config
from whet.shells.links import Link
from whet.shells.local import Local
from whet.shells.places import RUNTIMES
from whet.shells.remote import ROOM_S, keep_alive
from whet.shells.remote_link import WaitingConnections
from whet.shells.runtime import Runtime, RuntimeKind, ShellLimits
from whet.shells.serving_connection import Connection, Refused

log = logging.getLogger(__name__)

_OTHERS = 512  # connections without a runtime: strangers, and runs that wait for one


class ShellServer(Config):
    """The settings of ``whet shells``."""

    runtime: Annotated[RuntimeKind, Component(RUNTIMES)] = Local()
    """The kind of runtimes. Its ``limits`` are the most that a run may ask for."""
    most: int = Field(default=64, ge=1)
    """Runtimes at the same time. An episode that needs one more waits for the end of another."""
    longest_s: float = Field(default=3600.0, gt=0)
    """The most seconds of one command that a task may ask for, as tests at the end of an episode do."""
    host: str = Field("127.0.0.1", min_length=1)
    """The address to listen on."""
    port: int = Field(8700, ge=0, le=65535)
    """The port to listen on; 0: a free one."""
    certificate: str | None = None
    """A file with the certificate for TLS, and its chain, as PEM; needed beyond loopback."""
    key: str | None = None
    """A file with the private key of the certificate, as PEM."""

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for TLS. Raises ``ConfigError`` for files that can't be used, and if other machines would
        send the token unencrypted."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("certificate and key belong together: set both, or none")
        if self.certificate is None or self.key is None:
            if not reach(self.host)[0]:
                raise ConfigError(
                    f"host = {self.host} is reached from other machines, which would send the token and files "
                    "unencrypted; set certificate and key, files of a TLS certificate"
                )
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"certificate = {self.certificate}, key = {self.key}: {error}") from None
        return context


class RuntimeServer(ThreadingHTTPServer):
    """Serves runtimes until ``shutdown``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, settings: ShellServer, token: str) -> None:
        """Raises ``ConfigError`` if it can't listen, or can't open runtimes."""
        self.settings, self.token = settings, token
        self._tls = settings.tls()
        settings.runtime.check()
        self._connections = 0
        self._runtimes = 0
        self.links = dict[str, WaitingConnections]()  # of open runtimes, by their keys
        self._handed_over = set[socket.socket]()  # connections that belong to a link
        self._changed = threading.Condition()  # guards the numbers
        super().__init__((settings.host, settings.port), Connection, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(settings.host, settings.port)
        self.server_address = self.socket.getsockname()

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.server_address[1]}"

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        keep_alive(connection)
        if self._tls is not None:  # the thread of the connection shakes hands
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: object, client_address: object) -> bool:
        with self._changed:
            if self._connections >= self.settings.most + _OTHERS:
                return False
            self._connections += 1
            return True

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._connections -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a connection from %s ended", client_address, exc_info=True)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._changed:
            if request in self._handed_over:
                self._handed_over.remove(request)
                return
        super().shutdown_request(request)

    def hand_over(self, connection: socket.socket, key: str) -> None:
        """Let the link of the runtime with this key use a connection, and end it. Raises ``Refused``."""
        link = self.links.get(key)
        if link is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no open runtime with this key")
        with self._changed:
            self._handed_over.add(connection)
        link.add(connection)

    def open(self, work: str, limits: ShellLimits, link: Link | None = None) -> Runtime:
        """Return a new runtime, once there is room. Raises ``RuntimeFailure`` and ``Refused``."""
        asked = limits.model_dump()
        for name, most in self.settings.runtime.limits.model_dump().items():
            if asked[name] > most:
                text = f"limits.{name} = {asked[name]:g} is above {most:g}, the most of this server (runtime.limits)"
                raise Refused(HTTPStatus.BAD_REQUEST, text)
        with self._changed:
            if not self._changed.wait_for(lambda: self._runtimes < self.settings.most, ROOM_S):
                text = (
                    f"all of its {self.settings.most} runtimes were in use for {ROOM_S:g} s; start it with more (most)"
                )
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, text)
            self._runtimes += 1
        try:
            return self.settings.runtime.model_copy(update={"limits": limits}).open(work, link)
        except BaseException:
            self.closed()
            raise

    def closed(self) -> None:
        """Record that a runtime was closed."""
        with self._changed:
            self._runtimes -= 1
            self._changed.notify_all()
