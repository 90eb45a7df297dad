"""Digests of files: texts that name their scheme.

``sha256:...`` covers the whole file. ``blocks:...`` is for large files of weights: the SHA-256 of the size and of the
first 64 KiB in each 4 MiB, a sixty-fourth of the file. Training changes nearly all numbers of a tensor, so weights that
were trained or replaced have another digest; a single flipped bit may not be noticed.
"""

import hashlib
from pathlib import Path

_WHOLE = 256 << 20
_STRIDE, _BLOCK = 4 << 20, 64 << 10


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path, *, whole: bool = True) -> str:
    """Return the digest of a file: of the whole file, or unless ``whole``, of blocks if it has more than 256 MiB."""
    return _blocks(path) if not whole and path.stat().st_size > _WHOLE else f"sha256:{sha256(path)}"


def unchanged(path: Path, expected: str) -> bool:
    """Return whether a file still has a digest."""
    return expected == (_blocks(path) if expected.startswith("blocks:") else digest(path))


def _blocks(path: Path) -> str:
    size = path.stat().st_size
    content = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, _STRIDE):
            file.seek(start)
            content.update(file.read(_BLOCK))
    return f"blocks:{content.hexdigest()}"
