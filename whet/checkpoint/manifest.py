"""The manifest of a checkpoint folder: the size and SHA-256 of each file. Independent of tensors.

SHA-256, because processors compute it in hardware (about twice as fast as BLAKE2b, measured) and because ``sha256sum``
can verify it without this package.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from whet.base.digests import sha256
from whet.base.errors import WhetError
from whet.base.files import sync_folder
from whet.config import Config

FILE = "manifest.json"
_THREADS = 4

T = TypeVar("T")


class CheckpointError(WhetError):
    """A checkpoint can't be written, is missing, or is damaged."""


class Entry(Config):
    """One file."""

    size: int
    """Bytes."""
    sha256: str


class Manifest(Config):
    """The facts of a checkpoint and its files."""

    format: Literal[1] = 1
    step: int
    metric_name: str
    metric: float | None
    """None: not measured at this step."""
    files: dict[str, Entry]
    """By path relative to the folder, with /."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its own digest, so that a flipped bit in it is detected like one in a
        tensor."""
        value = self.model_dump()
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        return f"{json.dumps(value | {'sha256': digest}, indent=1)}\n".encode()


def seal(folder: Path, step: int, metric_name: str, metric: float | None) -> Manifest:
    """Hash all files, and flush files and folders to disk. Returns the manifest without writing it."""

    def flushed(path: Path) -> Entry:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return Entry(size=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())

    files = _on_each(flushed, _files(folder))
    for below, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(below))
    measured = metric if metric is not None and math.isfinite(metric) else None
    return Manifest(step=step, metric_name=metric_name, metric=measured, files=dict(sorted(files.items())))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Raises ``CheckpointError`` if it is missing or was changed."""
    path = folder / FILE
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        missing = "is missing" if folder.is_dir() else "is missing, as is its whole folder"
        raise CheckpointError(f"checkpoint is damaged: {path} {missing}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint is damaged: {path} can't be read as a manifest ({error})") from None


def decode(data: bytes) -> Manifest:
    """Return the manifest that was encoded. Raises ``ValueError``, ``KeyError`` or ``TypeError`` if it was changed."""
    value = json.loads(data)
    del value["sha256"]
    if value["format"] != 1:
        raise CheckpointError(f"its format is {value['format']}; this version of whet reads 1")
    manifest = Manifest.model_validate(value)
    if manifest.encode() != data:
        raise ValueError("its contents don't agree with its digest")
    return manifest


def check(folder: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Raise ``CheckpointError`` naming every file that is missing, surplus or changed. Without ``hashes`` only the
    contents of JSON files are compared, which are small."""
    present = _files(folder)
    present.pop(FILE, None)
    wrong = [f"{name} is missing" for name in manifest.files if name not in present]
    wrong += [f"{name} does not belong to it" for name in present if name not in manifest.files]
    for name in manifest.files.keys() & present.keys():
        size, expected = present[name].stat().st_size, manifest.files[name].size
        if size != expected:
            wrong.append(f"{name} has {size} bytes instead of {expected}")
    if not wrong:
        hashed = _on_each(sha256, {name: path for name, path in present.items() if hashes or path.suffix == ".json"})
        wrong = [f"{name} has changed (SHA-256)" for name, sha in hashed.items() if sha != manifest.files[name].sha256]
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}")


def _on_each(work: Callable[[Path], T], files: dict[str, Path]) -> dict[str, T]:
    with ThreadPoolExecutor(_THREADS) as threads:  # hashing and flushing release the GIL
        return dict(zip(files, threads.map(work, files.values()), strict=True))


def _files(folder: Path) -> dict[str, Path]:
    """Return all files below the folder, by relative path."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is not a regular file; a checkpoint may only contain regular files")
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path
    return files
