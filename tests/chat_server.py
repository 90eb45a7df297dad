"""A real HTTP server on loopback that speaks OpenAI's chat completions, with answers that a test computes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class ChatServer:
    """The address of the server, and the bodies of the requests that it was sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[dict[str, Any]] = []


@contextmanager
def chat_server(answer: Callable[[dict[str, Any]], str | int]) -> Iterator[ChatServer]:
    """Serve ``answer(body)``: the text of the reply, or the HTTP status of a failure."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            served.seen.append(body)
            text = answer(body)
            status = text if isinstance(text, int) else 200
            message = {"role": "assistant", "content": text}
            content = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join(timeout=30)
