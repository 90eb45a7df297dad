"""Ports for servers that can't choose one themselves."""

import socket

_HELD: list[socket.socket] = []


def reserved_ports(count: int) -> list[int]:
    """Return different ports of the loopback address that the system gives to nothing else while this process lives. A
    server binds them nevertheless, because this process doesn't listen and both set ``SO_REUSEADDR``."""
    ports = []
    for _ in range(count):
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        _HELD.append(reserved)
        ports.append(reserved.getsockname()[1])
    return ports
