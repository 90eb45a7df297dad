"""Files of the web that are named with their hash: fetched once, kept in the cache, refused if they are others."""

import hashlib
import re
import time
from pathlib import Path
from urllib.request import urlopen

from whet.base.errors import DataError
from whet.base.files import replacing
from whet.fetch.cache import cache_folder

_CHUNK = 1 << 20
_SILENCE = 30.0  # seconds without a byte


def fetch_file(url: str, suffix: str = ".jsonl", deadline: float = 1800.0) -> Path:
    """Return the local copy of ``https://.../rows.jsonl#sha256=...``, below ``data`` in the cache. Raises ``DataError``
    for an address without a hash, one that can't be reached, and a file that has another hash."""
    address, _, digest = url.partition("#sha256=")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise DataError(f"{url!r} must end in #sha256= and the hash of the file, as sha256sum prints it: 64 digits")
    kept = cache_folder().parent / "data" / f"{digest}{suffix}"
    if kept.is_file():
        return kept
    found, ends = hashlib.sha256(), time.monotonic() + deadline
    with replacing(kept) as staging, staging.open("wb") as file:
        try:
            with urlopen(address, timeout=_SILENCE) as reply:
                while chunk := reply.read1(_CHUNK):
                    found.update(chunk)
                    file.write(chunk)
                    if time.monotonic() > ends:
                        raise TimeoutError(f"it took longer than {deadline:g} s")
        except OSError as error:
            raise DataError(f"{address} can't be fetched: {error}") from None
        if found.hexdigest() != digest:
            raise DataError(
                f"{address} is not the file that was meant: its SHA-256 is {found.hexdigest()}, not {digest}"
            )
    return kept
