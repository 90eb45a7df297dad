"""Sockets that listen."""

import ipaddress
import socket

from whet.base.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises ``ConfigError`` if it can't."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = text.partition(" (")[0]  # Python adds the address
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another port or host") from None


def reach(host: str) -> tuple[bool, bool]:
    """Return whether only this machine reaches the address, and whether it stands for all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost", False
    return address.is_loopback, address.is_unspecified
