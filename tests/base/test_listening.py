"""Sockets that listen, on the loopback interface."""

import socket

from whet.base.listening import listen


def test_what_is_written_to_a_connection_is_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
