"""The addresses of servers and their keys, as recipes give them. Imports no torch."""

import os
from urllib.parse import urlsplit

from whet.base.errors import ConfigError


def plain_address(url: str) -> str:
    """Return the address of a server without a trailing ``/`` or ``/v1``. Raises ``ValueError`` for anything else."""
    plain = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(plain)
    if "@" in parts.netloc:
        raise ValueError("a URL has a password; put it into an environment variable and name it by api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{plain!r} is not the address of a server, such as http://10.0.0.5:8000")
    return plain


def key_in(variable: str | None, section: str) -> str | None:
    """Return the key in an environment variable, None without one. Raises ``ConfigError``, naming the ``section`` of
    the recipe, if the variable is not set."""
    if variable is not None and variable not in os.environ:
        raise ConfigError(
            f"{section}.api_key_env: the environment variable {variable} is not set; set it to the server's key"
        )
    return None if variable is None else os.environ[variable]
