import socket

import pytest

from tests.ports import reserved_ports


def test_a_reserved_port_is_given_to_a_server_and_to_nothing_else() -> None:
    ports = reserved_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a server that is started again
            with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
                pass
