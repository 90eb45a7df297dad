"""Web files identified by their hash: downloaded once, cached, and refused if the hash differs. And the
cache folder of all that is downloaded, and the offline setting."""

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from string import punctuation
from urllib.parse import quote
from urllib.request import urlopen

from whet.base.addresses import check_no_password
from whet.base.errors import ConfigError, DataError
from whet.base.files import replacing

_CHUNK = 1 << 20
_SILENCE = 30.0  # seconds without a byte
_FORBIDDEN: ContextVar[str] = ContextVar("_FORBIDDEN", default="")  # the reason for which nothing is downloaded


@contextmanager
def no_downloads(reason: str) -> Iterator[None]:
    """Refuse to download data in the block, for a ``reason`` that ends the error: "a plan downloads nothing"."""
    token = _FORBIDDEN.set(reason)
    try:
        yield
    finally:
        _FORBIDDEN.reset(token)


def check_allowed(path: str) -> None:
    """Raise ``DataError`` inside of ``no_downloads``."""
    if reason := _FORBIDDEN.get():
        raise DataError(f"{path} is on the web, and {reason}")


def fetch_file(url: str, suffix: str = ".jsonl", deadline: float = 1800.0, most: int | None = None) -> Path:
    """Return the local copy of ``https://.../rows.jsonl#sha256=...``, in ``data`` of the cache. Raises ``DataError``
    for an address without a hash, an address that can't be reached, a file with another hash, and one of more than
    ``most`` bytes."""
    address, _, digest = url.partition("#sha256=")
    try:
        check_no_password(address, "data is fetched from addresses without one")
    except ValueError as problem:
        raise DataError(str(problem)) from None
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise DataError(f"{url!r} must end in #sha256= and the hash of the file as sha256sum prints it: 64 digits")
    cached = cache_folder().parent / "data" / f"{digest}{suffix}"
    if cached.is_file():
        return cached
    check_allowed(address)
    actual, ends, size = hashlib.sha256(), time.monotonic() + deadline, 0
    with replacing(cached) as staging, staging.open("wb") as file:
        try:
            # As browsers do, letters that are not ASCII and spaces are written as %XX.
            with urlopen(quote(address, safe=punctuation), timeout=_SILENCE) as reply:
                while chunk := reply.read1(_CHUNK):
                    actual.update(chunk)
                    file.write(chunk)
                    size += len(chunk)
                    if most is not None and size > most:
                        raise DataError(f"{address} has more than {most:,} bytes")
                    if time.monotonic() > ends:
                        raise TimeoutError(f"it took longer than {deadline:g} s")
        except (OSError, HTTPException, ValueError) as error:
            raise DataError(f"{address} can't be fetched: {error}") from None
        if actual.hexdigest() != digest:
            raise DataError(f"{address} is not the expected file: its SHA-256 is {actual.hexdigest()}, not {digest}")
    return cached


def cache_folder() -> Path:
    """Return the folder of models: ``models`` in ``$WHET_CACHE``, by default in ``~/.cache/whet``. Raises
    ``ConfigError`` for a user without a home folder."""
    try:
        return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet").expanduser() / "models"
    except RuntimeError as error:
        raise ConfigError(f"there is no folder for the cache: {error} Name one: WHET_CACHE=FOLDER") from None


@contextmanager
def filling(folder: Path, deadline: float = -1.0) -> Iterator[None]:
    """Hold the lock of a folder in the cache. Raises ``filelock.Timeout`` if another process
    holds it for ``deadline`` seconds, and ``ConfigError`` if the cache can't be written."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_suffix(".lock"), timeout=deadline)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise ConfigError(
            f"the cache {folder.parent} can't be written: {error.strerror or error}. Name another folder: "
            "WHET_CACHE=FOLDER"
        ) from error
    try:
        yield
    finally:
        lock.release()


def offline() -> bool:
    """Return whether downloads are forbidden, by the environment variables of Hugging Face's libraries."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
