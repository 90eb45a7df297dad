"""Sockets that listen, on the loopback interface, and who reaches an address."""

import socket

import pytest

from whet.base.listening import listen, reach


def test_what_is_written_to_a_connection_is_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("host", "local", "anywhere"),
    [
        ("127.0.0.1", True, False), ("127.1", True, False), ("::1", True, False), ("LocalHost", True, False),
        ("0.0.0.0", False, True), ("0", False, True), ("::", False, True),
        ("10.0.0.5", False, False), ("node7", False, False), ("b\0d", False, False),
    ],
)  # fmt: skip
def test_who_reaches_an_address_in_any_form_that_sockets_take(host: str, local: bool, anywhere: bool) -> None:
    assert reach(host) == (local, anywhere)
