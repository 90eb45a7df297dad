"""A connection of the server of ``whet shells``, on a thread: a runtime with its requests, or a connection of a link.

Who waits for whom: a connection without a runtime must send a request with the token within seconds; after that the
runtime waits for its run, whose end the system reports.
"""

import hmac
import io
import logging
import re
import select
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from pydantic import ValidationError

from whet.base.errors import WhetError
from whet.shells.places import FILE_PROBLEM, WORK
from whet.shells.remote import Message
from whet.shells.remote_link import WaitingConnections
from whet.shells.runtime import Ended, FileProblem, Runtime, RuntimeFailure, ShellLimits

if TYPE_CHECKING:
    from whet.shells.serving import RuntimeServer

log = logging.getLogger(__name__)

_PATIENCE_S = 15.0  # seconds for the first request, and between two pieces of a request
_WATCH_MS = 500  # between two looks at whether a command has ended


class Refused(Exception):
    """A request that the server does not answer. ``status``: of HTTP."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class Connection(BaseHTTPRequestHandler):
    """One connection and its runtime."""

    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE_S
    server: "RuntimeServer"
    runtime: Runtime | None = None
    link: WaitingConnections | None = None

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
            if answer is None:
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
        if self.link is not None:
            self.server.links.pop(self.link.key, None)
            self.link.close()
        if self.runtime is not None:
            try:
                self.runtime.close()
            finally:
                self.server.closed()
        super().finish()

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)

    def _answer(self) -> Message | None:
        """Return the answer to a request; None if the connection now belongs to a link."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the token is wrong; whet shells printed it when it started")
        self._stranger.cancel()
        message = self._message()
        if self.path == "/link" and self.runtime is None:
            self.server.hand_over(self.connection, str(message.fields.get("key")))
            return None
        if self.path == "/open" and self.runtime is None:
            work, limits = _opening(message)
            self.link = WaitingConnections() if message.fields.get("linked") else None
            self.runtime = self.server.open(work, limits, None if self.link is None else self.link.take)
            if self.link is None:
                return Message({})
            self.server.links[self.link.key] = self.link
            return Message({"key": self.link.key})
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
                ended = self._run(runtime, command, seconds, str(fields["folder"]))
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

    def _run(self, runtime: Runtime, command: str, seconds: float, folder: str) -> Ended:
        """Run a command, and end it if the run is lost meanwhile."""
        ended = threading.Event()

        def watch() -> None:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            while not ended.is_set():
                if poll.poll(_WATCH_MS) and not ended.is_set():  # a run sends nothing before it has the answer
                    runtime.close()
                    return

        threading.Thread(target=watch, name="whet-watch", daemon=True).start()
        try:
            return runtime.run(command, seconds, folder)
        finally:
            ended.set()

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
