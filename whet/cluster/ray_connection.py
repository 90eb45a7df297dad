"""The connection to a Ray cluster: join one, or start a private one on this machine."""

import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.base.errors import WhetError
from whet.base.extras import missing
from whet.base.scratch import Scratch
from whet.processes.machine import environment

_users = 0  # of the connection, which is shared by the process
_ours = False
_scratch: Scratch | None = None  # sockets and logs of a cluster that was started here

_NICENESS = "RAY_worker_niceness"  # Ray's own default, 15, leaves workers hardly any time next to other programs
_LONGEST_FOLDER = 17  # characters; Ray creates sockets 90 characters below it, and their paths are limited to 107


def connect(address: str | None, setting: str = "cluster.address") -> None:
    """Connect this process to the Ray cluster at ``address``, which a ``setting`` names; None starts one here. An
    existing connection is reused. Each call must be paired with ``leave``.

    Raises ``WhetError`` if Ray is not installed, or the cluster can't be reached or refuses access.
    """
    global _users, _ours, _scratch
    try:
        if address is None:
            scratch = _private_folder()
            try:
                with environment(_private()):  # other children of this process, such as graders, must not see the token
                    started = _init("local", setting, include_dashboard=False, _temp_dir=f"{scratch.path}/ray")
            except WhetError:
                scratch.keep()  # its logs
                raise
            if started:
                _ours, _scratch = True, scratch
        else:
            _ours |= _init(address, setting)
    except ImportError as error:
        raise missing("ray", "cluster.type=ray", error) from None
    _users += 1


def leave() -> None:
    """Release the connection. The last release closes it, unless other code opened it; a cluster that was started here
    ends with it."""
    import ray

    global _users, _ours, _scratch
    _users -= 1
    if _ours and not _users:
        _ours = False
        ray.shutdown()
        if _scratch is not None:
            _scratch.remove()
            _scratch = None


def _private_folder() -> Scratch:
    """Create a folder that only this user can access: Ray makes its subfolder world-writable, so other users could
    replace sockets."""
    parent = tempfile.gettempdir()
    return Scratch("ray", None if len(parent) <= _LONGEST_FOLDER else Path("/tmp"))


def has_gpus(address: str) -> bool:
    """Return whether any node of the cluster at ``address`` has a GPU. Raises like ``connect``."""
    connect(address)
    import ray

    try:
        return ray.cluster_resources().get("GPU", 0.0) > 0
    finally:
        leave()


def _private() -> dict[str, str]:
    """Return Ray's settings for a private cluster."""
    return {
        "RAY_AUTH_MODE": "token",  # clients without the token are refused
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes this node use loopback, on Linux too
        "RAY_USAGE_STATS_ENABLED": "0",
        _NICENESS: os.environ.get(_NICENESS, "0"),
    }


def _init(address: str, setting: str, **settings: object) -> bool:
    import ray

    if ray.is_initialized():
        return False
    try:
        _check_listens(address)
        with _settings_read_again(), _handlers_kept():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **settings)
    except Exception as error:  # ConnectionError, RuntimeError, AuthenticationError and others
        problem = f"no Ray cluster was reached at {setting}={address}"
        hint = (
            f"start one there, or leave {setting} empty to start one here; a cluster with a token needs "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in this process too"
        )
        if address == "local":
            logs = f"{settings['_temp_dir']}/session_latest/logs"
            problem, hint = "Ray could not start here", f"see the logs in {logs}, which the next start removes"
        text = str(error).strip().partition("\n")[0]
        raise WhetError(f"{problem} ({type(error).__name__}: {text}); {hint}") from error
    return True


def _check_listens(address: str) -> None:
    """Fail fast if no server listens at the address: Ray would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


@contextmanager
def _settings_read_again() -> Iterator[None]:
    """Make Ray read its settings again, because it reads them only when it is imported."""
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


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's would end it in the middle of a step, without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)
