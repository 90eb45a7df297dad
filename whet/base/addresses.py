"""The addresses of servers and their keys, as recipes and options give them. Imports no torch."""

import os
import re
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from whet.base.errors import ConfigError


def checked_address(url: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Return the URL. Raises ``ValueError`` unless it names a server, with a port that exists and without a query. Its
    text has no password."""
    shown, plain = (re.sub("//.*@", start, url, flags=re.DOTALL) for start in ("//...@", "//"))
    # A slash in a password ends the name of the host, so that the password's beginning is taken for the port.
    for text, hint in ((plain, ""), (url, "a password's '/', '?', '#' and '[' are written %2F, %3F, %23 and %5B")):
        try:
            parts = urlsplit(text)
            named = parts.scheme in schemes and parts.hostname and parts.port != 0
        except ValueError as problem:  # of the port, or of brackets
            raise ValueError(f"{shown!r} is not the address of a server: {hint or problem}") from None
    if not named or parts.query or parts.fragment or any(sign.isspace() for sign in url):
        raise ValueError(f"{shown!r} is not the address of a server, such as {schemes[0]}://10.0.0.5:8000")
    return url


HttpAddress = Annotated[str, AfterValidator(checked_address)]
"""The URL of a server of HTTP, to which paths are appended."""


def plain_address(url: str) -> str:
    """Return the address of a server without a trailing ``/`` or ``/v1``. Raises ``ValueError`` for anything else."""
    plain = checked_address(url.rstrip("/").removesuffix("/v1"))
    if "@" in urlsplit(plain).netloc:
        raise ValueError("a URL has a password; put it into an environment variable and name it by api_key_env")
    return plain


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
