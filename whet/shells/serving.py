"""The server of ``whet shells``: opens runtimes for runs on other machines.

Each connection has a thread and at most one runtime, which is closed when the connection ends. A request is the name of
a method, a line of JSON and bytes; see ``whet.shells.remote`` for the other side. Who waits for whom: a connection
without a runtime must send a request with the token within seconds; after that the runtime waits for its run, whose end
the system reports.
"""

import hmac
import io
import logging
import re
import socket
import ssl
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

from pydantic import Field, ValidationError

from whet.base.errors import ConfigError, WhetError
from whet.base.listening import listen, reach
from whet.config import Component, Config
from whet.shells.local import Local
from whet.shells.places import FILE_PROBLEM, WORK
from whet.shells.registry import RUNTIMES
from whet.shells.remote import ROOM_S, Message, keep_alive
from whet.shells.runtime import FileProblem, Runtime, RuntimeFailure, RuntimeKind, ShellLimits

log = logging.getLogger(__name__)

_PATIENCE_S = 15.0  # seconds for the first request, and between two pieces of a request
_OTHERS = 512  # connections without a runtime: strangers, and runs that wait for one


class ShellServer(Config):
    """The settings of ``whet shells``."""

    runtime: Annotated[RuntimeKind, Component(RUNTIMES)] = Local()
    """The kind of runtimes. Its ``limits`` are the most that a run may ask for."""
    most: int = Field(default=64, ge=1)
    """Runtimes at the same time. An episode that needs one more waits for the end of another."""
    longest_s: float = Field(default=3600.0, gt=0)
    """The most seconds of one command that a task may ask for, as tests at the end of an episode do."""
    host: str = "127.0.0.1"
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
        self._changed = threading.Condition()  # guards the numbers
        super().__init__((settings.host, settings.port), _Connection, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(settings.host, settings.port)
        self.server_address = self.socket.getsockname()

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.server_address[1]}"

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        keep_alive(connection)
        if self._tls is not None:  # the thread of the connection shakes hands
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            if self._connections >= self.settings.most + _OTHERS:
                return False
            self._connections += 1
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection from %s ended", client_address, exc_info=True)

    def open(self, work: str, limits: ShellLimits) -> Runtime:
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
            return self.settings.runtime.model_copy(update={"limits": limits}).open(work)
        except BaseException:
            self.closed()
            raise

    def closed(self) -> None:
        """Record that a runtime was closed."""
        with self._changed:
            self._runtimes -= 1
            self._changed.notify_all()


class Refused(Exception):
    """A request that the server does not answer. ``status``: of HTTP."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class _Connection(BaseHTTPRequestHandler):
    """One connection and its runtime."""

    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE_S
    server: RuntimeServer
    runtime: Runtime | None = None

    def setup(self) -> None:
        super().setup()
        self._stranger = threading.Timer(_PATIENCE_S, self._disconnect)  # however slowly it sends
        self._stranger.daemon = True
        self._stranger.start()

    def do_POST(self) -> None:
        try:
            answer = self._answer()
        except Refused as refusal:
            self._send(refusal.status, Message({"problem": str(refusal)}))
            self.close_connection = True
        except FileProblem as problem:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, Message({"problem": str(problem), "status": FILE_PROBLEM}))
        except (RuntimeFailure, WhetError) as failure:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, Message({"problem": str(failure)}))
            self.close_connection = True
        else:
            self._send(HTTPStatus.OK, answer)

    def handle_one_request(self) -> None:
        if self.runtime is not None:  # the run may think for any time before its next request
            self.connection.settimeout(None)
            assert isinstance(self.rfile, io.BufferedReader)
            if not self.rfile.peek(1):
                self.close_connection = True
                return
            self.connection.settimeout(_PATIENCE_S)
        super().handle_one_request()

    def finish(self) -> None:
        self._stranger.cancel()
        if self.runtime is not None:
            try:
                self.runtime.close()
            finally:
                self.server.closed()
        super().finish()

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self) -> Message:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the token is wrong; whet shells printed it when it started")
        self._stranger.cancel()
        message = self._message()
        if self.path == "/open" and self.runtime is None:
            self.runtime = self.server.open(*_opening(message))
            return Message({})
        if self.runtime is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "the first request of a connection must be POST /open")
        try:
            return self._act(self.runtime, message)
        except (KeyError, TypeError, ValueError) as problem:
            raise Refused(HTTPStatus.BAD_REQUEST, f"not a valid request {self.path}: {problem}") from None

    def _act(self, runtime: Runtime, message: Message) -> Message:
        fields, content = message.fields, message.content
        match self.path:
            case "/run":
                seconds = min(float(fields["seconds"]), self.server.settings.longest_s)
                command = content.decode("utf-8", "surrogateescape")
                ended = runtime.run(command, seconds, str(fields["folder"]))
                return Message({"status": ended.status, "ending": ended.ending}, ended.output)
            case "/write":
                runtime.write(str(fields["path"]), content)
                return Message({})
            case "/read":
                most = self.server.settings.runtime.limits.disk_mib << 20
                return Message({}, runtime.read(str(fields["path"]), min(int(fields["limit"]), most)))
            case "/snapshot":
                return Message({}, runtime.snapshot())
            case "/restore":
                runtime.restore(content)
                return Message({})
        raise Refused(HTTPStatus.NOT_FOUND, f"there is no POST {self.path[:80]}")

    def _message(self) -> Message:
        most = (self.server.settings.runtime.limits.disk_mib * 2 + 1) << 20
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {most:,} bytes")
        try:
            return Message.unpacked(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request is a line of JSON, then bytes") from None

    def _send(self, status: HTTPStatus, message: Message) -> None:
        body = message.packed()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _opening(message: Message) -> tuple[str, ShellLimits]:
    """Return the work folder and the limits that a run asks for. Raises ``Refused``."""
    work = str(message.fields.get("work", WORK))
    if not re.fullmatch(r"/\w+", work, re.ASCII):
        raise Refused(HTTPStatus.BAD_REQUEST, f"the work folder {work[:80]!r} is not a folder below the root")
    try:
        return work, ShellLimits.model_validate(message.fields.get("limits", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refused(HTTPStatus.BAD_REQUEST, f"limits.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
