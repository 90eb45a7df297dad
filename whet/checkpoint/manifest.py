"""What a checkpoint folder must hold: the size and SHA-256 of each file. Writes, reads and checks; knows no tensors.

SHA-256, because processors compute it in hardware (measured at about twice the speed of BLAKE2b) and because
``sha256sum`` can check it without this package.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import WhetError
from whet.files import sync_folder

FILE = "manifest.json"
_FORMAT = 1
_THREADS = 4

T = TypeVar("T")


class CheckpointError(WhetError):
    """A checkpoint can't be written, is missing, or is damaged."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One file."""

    size: int  # bytes
    sha256: str


@dataclass(slots=True, frozen=True)
class Manifest:
    """What a checkpoint is and holds."""

    step: int
    metric_name: str
    metric: float | None  # None: not measured at this step
    files: dict[str, Entry]  # by path relative to the folder, with /

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        files = {name: {"size": e.size, "sha256": e.sha256} for name, e in sorted(self.files.items())}
        value: dict[str, Any] = {"format": _FORMAT, "step": self.step, "metric_name": self.metric_name}
        value |= {"metric": self.metric, "files": files}
        # The digest of the manifest itself, so that a flipped bit in the metric is found like one in a tensor.
        body = json.dumps(value, sort_keys=True, allow_nan=False)
        return (json.dumps(value | {"sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n").encode()


def seal(folder: Path, step: int, metric_name: str, metric: float | None) -> Manifest:
    """Hash every file and flush it and every folder to the disk. Returns the manifest without writing it."""

    def flushed(path: Path) -> Entry:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return Entry(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())

    files = _on_each(flushed, _files(folder))
    for below, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(below))
    return Manifest(step, metric_name, metric if metric is not None and math.isfinite(metric) else None, files)


def read_manifest(folder: Path) -> Manifest:
    """Raises ``CheckpointError`` where it is missing or is not exactly what was written."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        what = "is missing" if folder.is_dir() else "is missing, as is its whole folder"
        raise CheckpointError(f"checkpoint is damaged: {path} {what}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint is damaged: {path} can't be read ({error})") from error
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {value['format']}; this version of whet reads {_FORMAT}")
        files = {name: Entry(entry["size"], entry["sha256"]) for name, entry in value["files"].items()}
        manifest = Manifest(value["step"], value["metric_name"], value["metric"], files)
        if manifest.encode() != data:
            raise ValueError("its contents don't agree with its digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint is damaged: {path} is not a manifest ({error})") from None
    return manifest


def check(folder: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Raises ``CheckpointError`` naming every file that is missing, surplus or changed."""
    there = _files(folder)
    wrong = [f"{name} is missing" for name in manifest.files if name not in there]
    wrong += [f"{name} does not belong to it" for name in there if name not in manifest.files and name != FILE]
    sizes = {name: there[name].stat().st_size for name in manifest.files if name in there}
    for name, size in sizes.items():
        if size != manifest.files[name].size:
            wrong.append(f"{name} has {size} bytes instead of {manifest.files[name].size}")
    if hashes and not wrong:
        found = _on_each(_sha256, {name: there[name] for name in manifest.files})
        wrong = [f"{name} has changed (SHA-256)" for name, sha in found.items() if sha != manifest.files[name].sha256]
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _on_each(work: Callable[[Path], T], files: dict[str, Path]) -> dict[str, T]:
    with ThreadPoolExecutor(_THREADS) as threads:  # hashing and flushing both run without the interpreter's lock
        return dict(zip(files, threads.map(work, files.values()), strict=True))


def _files(folder: Path) -> dict[str, Path]:
    """Everything in the folder that is not a folder, by relative path."""
    found = {}
    for below, _, names in os.walk(folder):
        for name in names:
            path = Path(below) / name
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path} is not a plain file; a checkpoint can hold nothing else")
            found[path.relative_to(folder).as_posix()] = path
    return found
