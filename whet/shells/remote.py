"""A runtime on another machine, opened by a server there (``whet shells``).

    run                                       server
     ├── a connection for each runtime ──▶    a thread: POST /open, /run, /write, /read, /snapshot, /restore
     ├── further ones for its link     ──▶    POST /link (``remote_link.py``)
     └── closes it, or ends            ──▶    closes the runtime

A runtime lives exactly as long as the connection that opened it, so nothing of a run that was killed, or of a machine
that was lost, remains on the server. Who waits for whom: every answer has a deadline.
"""

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from whet.base.addresses import checked_address, key_in
from whet.base.errors import ConfigError, WhetError
from whet.base.strict_json import JsonObject
from whet.shells.links import Link, end_connection
from whet.shells.places import FILE_PROBLEM, WORK, Ending
from whet.shells.remote_link import Tunnel
from whet.shells.runtime import Ended, FileProblem, Runtime, RuntimeFailure, RuntimeKind

_CONNECT_S = 15.0  # seconds for a connection
_ANSWER_S = 180.0  # seconds for an answer, beyond the seconds of a command
ROOM_S = 600.0
"""Seconds for which a server with all runtimes in use waits for the end of one."""

Action = Literal["open", "run", "write", "read", "snapshot", "restore"]


@dataclass(frozen=True, slots=True)
class Message:
    """The body of a request or an answer: a line of JSON, then bytes."""

    fields: JsonObject
    content: bytes = b""

    def packed(self) -> bytes:
        return json.dumps(self.fields).encode() + b"\n" + self.content

    @classmethod
    def unpacked(cls, body: bytes) -> "Message":
        """Raises ``ValueError`` for other bytes."""
        line, _, content = body.partition(b"\n")
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("a message must begin with an object of JSON")
        return cls(fields, content)


class Remote(RuntimeKind):
    """Runtimes of a server that was started with ``whet shells``; see ``docs/shells.md``."""

    url: str
    """The address of the server, such as https://node7:8700."""
    token_env: str = "WHET_SHELLS_TOKEN"
    """The environment variable that holds the server's token."""
    certificate: str | None = None
    """A file with the certificate of the authority that signed the server's, as PEM; None: the system's authorities."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(checked_address(url))
        if parts.path.strip("/"):
            raise ValueError("must be the address of a server, such as https://node7:8700")
        return url.rstrip("/")

    @property
    def token(self) -> str:
        """The token. Raises ``ConfigError`` if the environment variable holds none."""
        return key_in(self.token_env, "runtime.token_env", "the token that whet shells printed") or ""

    def tls(self) -> ssl.SSLContext:
        """Return the context for TLS. Raises ``ConfigError`` for a certificate that can't be read."""
        try:
            return ssl.create_default_context(cafile=self.certificate)
        except OSError as error:
            raise ConfigError(
                f"runtime.certificate = {self.certificate}: {error}; name a file with the certificate of the "
                "authority, as PEM"
            ) from None

    def check(self) -> None:
        _ = self.token, self.tls()
        try:
            runtime = self.open()
        except WhetError as problem:
            raise ConfigError(f"runtime.url: {problem}") from None
        try:
            runtime.run("true")
        except WhetError as problem:
            raise ConfigError(f"runtime.url: the server {self.url} runs no commands: {problem}") from None
        finally:
            runtime.close()

    def open(self, work: str = WORK, link: Link | None = None) -> "RemoteRuntime":
        return RemoteRuntime(self, work, link)


class RemoteRuntime(Runtime):
    """The run's side of one runtime."""

    def __init__(self, settings: Remote, work: str = WORK, link: Link | None = None) -> None:
        self.limits, self._url = settings.limits, settings.url
        self._headers = {"Authorization": f"Bearer {settings.token}"}
        self._connection = _connected(settings)
        self._tunnel: Tunnel | None = None
        try:
            opening = Message({"work": work, "limits": self.limits.model_dump(), "linked": link is not None})
            key = self._ask("open", opening, ROOM_S).fields.get("key")
            if link is not None:
                self._tunnel = Tunnel(partial(_ask_for_link, settings, self._headers, str(key)), link)
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float | None = None, folder: str = "") -> Ended:
        seconds = self.limits.deadline_s if seconds is None else seconds
        content = command.encode("utf-8", "surrogateescape")
        answer = self._ask("run", Message({"seconds": seconds, "folder": folder}, content), seconds)
        ending: Ending = answer.fields["ending"]
        return Ended(answer.fields["status"], ending, answer.content)

    def write(self, path: str, content: bytes) -> None:
        self._ask("write", Message({"path": path}, content))

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        return self._ask("read", Message({"path": path, "limit": limit})).content

    def snapshot(self) -> bytes:
        return self._ask("snapshot", Message({})).content

    def restore(self, archive: bytes) -> None:
        self._ask("restore", Message({}, archive))

    def close(self) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
        if self._connection.sock is not None:
            end_connection(self._connection.sock)  # wakes a thread that waits for an answer
        self._connection.close()

    def _ask(self, action: Action, message: Message, seconds: float = 0.0) -> Message:
        """Return the server's answer. Raises ``FileProblem`` or ``RuntimeFailure``."""
        if self._connection.sock is None:
            raise RuntimeFailure(f"the runtime on {self._url} is closed")
        self._connection.sock.settimeout(seconds + _ANSWER_S)
        try:
            self._connection.request("POST", f"/{action}", message.packed(), self._headers)
            response = self._connection.getresponse()
            answer = Message.unpacked(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise RuntimeFailure(f"the runtime on {self._url} was lost: {_words(error)}") from None
        if response.status == http.client.OK:
            return answer
        problem = str(answer.fields.get("problem"))
        if answer.fields.get("status") == FILE_PROBLEM:
            raise FileProblem(problem)
        self.close()
        raise RuntimeFailure(f"the server {self._url} refuses {action} (HTTP {response.status}): {problem}")


def _ask_for_link(settings: Remote, headers: Mapping[str, str], key: str) -> socket.socket:
    """Return a new connection that waits for one from inside a runtime."""
    connection = _connected(settings)
    connection.request("POST", "/link", Message({"key": key}).packed(), headers)
    return connection.sock


def _connected(settings: Remote) -> http.client.HTTPConnection:
    """Return an open connection that is not opened again once it is lost. Raises ``RuntimeFailure``."""
    parts = urlsplit(settings.url)
    host, port = parts.hostname or "", parts.port
    try:
        connection = (
            http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=settings.tls())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        )
        connection.connect()
    except (OSError, ValueError) as error:  # ValueError: a host that is not a name
        raise RuntimeFailure(f"no connection to the server {settings.url}: {_words(error)}") from None
    connection.auto_open = 0
    keep_alive(connection.sock)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection to a machine that is lost, after about a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
