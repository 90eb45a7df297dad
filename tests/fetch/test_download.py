"""A web file has the given hash or is an error; it is fetched once."""

import hashlib
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from whet.base.errors import DataError
from whet.data.row import Row, Text, read_rows
from whet.fetch.download import fetch_file


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Question(Row):
    question: Text


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder / "rows.jsonl", f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        server.shutdown()


def test_rows_are_fetched_once_and_cached(served):
    file, address = served
    file.write_text('{"question": "Who?"}\n')
    url = f"{address}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert read_rows(url, Question)[0].question == "Who?"
    file.unlink()
    assert read_rows(url, Question)[0].question == "Who?"


def test_letters_and_spaces_of_an_address_are_those_of_the_file(served):
    file, address = served
    file.with_name("sieben Bäume.jsonl").write_text("{}")
    address = address.replace("rows.jsonl", "sieben Bäume.jsonl")
    assert fetch_file(f"{address}#sha256={hashlib.sha256(b'{}').hexdigest()}").read_text() == "{}"


@pytest.mark.parametrize("answer", [b"hello", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nab"])
def test_a_server_that_breaks_the_protocol_is_named(answer, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))

    def respond(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=respond, args=(listener,), daemon=True).start()
        with pytest.raises(DataError, match=r"http://127\.0\.0\.1:\d+/rows can't be fetched"):
            fetch_file(f"http://127.0.0.1:{listener.getsockname()[1]}/rows#sha256={'0' * 64}")


def test_a_file_with_another_hash_is_an_error_and_not_cached(served, tmp_path):
    file, address = served
    file.write_text('{"question": "Who?"}\n')
    url = f"{address}#sha256={'0' * 64}"
    with pytest.raises(DataError, match="is not the expected file"):
        fetch_file(url)
    assert not list((tmp_path / "cache" / "data").iterdir())


@pytest.mark.parametrize(
    ("end", "message"),
    [("", "must end in #sha256="), ("#sha256=abc", "must end in"), (f"x#sha256={'0' * 64}", "can't be fetched.*404")],
)
def test_an_address_without_a_hash_or_without_a_file_is_an_error(served, end, message):
    with pytest.raises(DataError, match=message):
        fetch_file(served[1] + end)
