"""Sockets that listen."""

import ipaddress
import socket
from contextlib import suppress

from whet.base.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises ``ConfigError`` if it can't.

    What is written to a connection is sent at once. An answer's body would wait 40 ms for the client to acknowledge its
    head: asyncio changes that for no connection to a socket whose protocol isn't named, as here.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = text.partition(" (")[0]  # Python adds the address
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another port or host") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


def reach(host: str) -> tuple[bool, bool]:
    """Return whether only this machine reaches the address, and whether it stands for all addresses."""
    with suppress(OSError, ValueError):
        host = socket.inet_ntoa(socket.inet_aton(host))  # sockets also take 0 for 0.0.0.0, and 127.1
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost", False
    return address.is_loopback, address.is_unspecified
