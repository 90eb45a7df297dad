"""The addresses of servers and their keys, as recipes and options give them. Imports no torch."""

import os
import re
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from whet.base.errors import ConfigError


def checked_address(url: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Return the URL. Raises ``ValueError`` unless it names a server, with a port that exists and without a password or
    a query. Its text has no password."""
    if "@" in url:
        raise ValueError(
            f"{hidden(url)!r} has a password or a user, which run folders and messages would show; leave it out. "
            "A key is put into an environment variable, which is named by api_key_env or --key-env"
        )
    try:
        parts = urlsplit(url)
        named = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError as problem:  # of the port, or of brackets
        raise ValueError(f"{url!r} is not the address of a server: {problem}") from None
    if not named or parts.query or parts.fragment or any(sign.isspace() for sign in url):
        raise ValueError(f"{url!r} is not the address of a server, such as {schemes[0]}://10.0.0.5:8000")
    return url


def hidden(text: str) -> str:
    """Return a text without the users and passwords of the addresses in it."""
    return re.sub(r"//(?:(?!\w+://).)*@", "//...@", text, flags=re.DOTALL)  # a password may have spaces


def check_no_password(url: str, instead: str) -> None:
    """Raise ``ValueError``, with what to do ``instead``, for a URL with a password, of any scheme. A user's name alone
    is none."""
    if re.search(r"//.*:.*@", url, re.DOTALL):
        raise ValueError(f"{hidden(url)!r} has a password, which run folders and messages would show; {instead}")


HttpAddress = Annotated[str, AfterValidator(checked_address)]
"""The URL of a server of HTTP, to which paths are appended."""


def plain_address(url: str) -> str:
    """Return the address of a server without a trailing ``/`` or ``/v1``. Raises ``ValueError`` for anything else."""
    return checked_address(url.rstrip("/").removesuffix("/v1"))


def key_in(variable: str | None, setting: str, what: str = "the server's key") -> str | None:
    """Return the key in an environment variable, None without one. Raises ``ConfigError``, naming the ``setting`` that
    names the variable, if it is not set, or holds what no header of HTTP may: the libraries' errors would quote it."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"{setting}: the environment variable {variable} is not set; set it to {what}")
    return checked_key(os.environ[variable], f"{setting}: the environment variable {variable}")


def checked_key(key: str, name: str) -> str:
    """Return a key that clients can send in a header of HTTP. Otherwise raises ``ConfigError`` with its ``name``."""
    if not key or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(f"{name} is not a key: it is empty, or has spaces, line breaks or letters outside of ASCII")
    return key
