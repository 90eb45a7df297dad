"""The way to a Ray cluster: join one, or start one on this machine that nobody else can use."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whet.errors import WhetError
from whet.processes.environment import environment

_users = 0  # of the connection, which is the process's
_ours = False


def connect(address: str | None) -> None:
    """Connect this process to the Ray cluster at ``address``; None starts one here. A connection that is there is used
    as it is. Each who connects leaves.

    Raises ``WhetError`` where there is no Ray, no such cluster, or no permission.
    """
    global _users, _ours
    try:
        if address is None:
            with environment(_private()):  # other children of this process, such as graders, must not know the token
                _ours |= _init("local", include_dashboard=False)
        else:
            _ours |= _init(address)
    except ImportError as error:
        raise WhetError(f"cluster.type=ray needs Ray ({error}); install it with: pip install 'whet[ray]'") from None
    _users += 1


def leave() -> None:
    """The last one ends the connection, unless somebody else made it; a cluster that was started here ends with it."""
    import ray

    global _users, _ours
    _users -= 1
    if _ours and not _users:
        _ours = False
        ray.shutdown()


def _private() -> dict[str, str]:
    """Ray's settings for a cluster of this process alone."""
    return {
        "RAY_AUTH_MODE": "token",  # nobody without the token may connect
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: this node's address is loopback, on Linux too
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _init(address: str, **settings: Any) -> bool:
    import ray

    if ray.is_initialized():
        return False
    try:
        _check_listens(address)
        with _settings_read_again():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **settings)
    except Exception as error:  # ConnectionError, RuntimeError, AuthenticationError and others
        problem = f"no Ray cluster was reached at cluster.address={address}"
        hint = (
            "start one there, or leave cluster.address empty to have one started here; one that asks for a token needs "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in this process too"
        )
        if address == "local":
            problem, hint = "Ray could not start here", "see its logs, by default in /tmp/ray/session_latest/logs"
        text = str(error).strip().partition("\n")[0]
        raise WhetError(f"{problem} ({type(error).__name__}: {text}); {hint}") from error
    return True


def _check_listens(address: str) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


@contextmanager
def _settings_read_again() -> Iterator[None]:
    """Ray reads its settings when it is imported and keeps them, and that may have been long ago."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined,unused-ignore]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    many_nodes = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR) != "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = many_nodes
