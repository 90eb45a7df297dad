"""Atomic writes: a file or folder is made beside its place, flushed to the disk and renamed. So a reader, or the next
start after a kill, sees either the old content or all of the new. Imports torch only for tensors."""

import ctypes
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.errors import WhetError

if TYPE_CHECKING:
    from torch import Tensor


_STAGED = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}")  # the names of what is made by ``replacing``


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path at which to make a file or folder. At the end it takes the place of ``path``; if anything fails it
    is removed. Makes missing folders. Raises ``WhetError`` naming ``path`` where the system refuses.

    >>> with replacing(folder) as staging:
    ...     staging.mkdir()
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield staging
            _flush(staging)
            _rename_over(staging, path)
        finally:
            with suppress(OSError):
                remove(staging)
        sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside (a full disk, a read-only one, a folder in the place of a file) into a ``WhetError``
    that names ``path``."""
    try:
        yield
    except OSError as error:
        raise WhetError(f"{path} can't be written: {error}") from error


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file with ``replacing``; text in UTF-8."""
    with replacing(path) as staging:
        staging.write_bytes(data.encode() if isinstance(data, str) else data)


def append(path: Path, data: str) -> None:
    """Append to a file and flush it. A kill may leave a torn end; whoever reads the file skips it."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a rename or a deletion survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link (not what it points to), if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun in a folder with ``replacing``; not what is in its folders."""
    for path in folder.glob(".*"):
        found = _STAGED.fullmatch(path.name)
        if found and not _alive(int(found[1])):
            with suppress(OSError):
                remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """Write a safetensors file with ``replacing``. Tensors may be on any device, strided, or share memory: each is
    written whole."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    with replacing(path) as staging:
        save_file(plain, staging, {"format": "pt"})
        staging.chmod(0o644)  # safetensors' 0600 would lock out whoever shares the run folder


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """Return the tensors of a safetensors file, by name, on the CPU. Raises ``WhetError`` where it is missing or
    damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise WhetError(f"{path} can't be read as safetensors: {error}; load another checkpoint") from error


def in_words(size: int) -> str:
    """Write a number of bytes for people.

    >>> in_words(1536 * 1024**2)
    '1.5 GiB'
    """
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{size} B"


def _flush(path: Path) -> None:
    if not path.is_dir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return
    for each in path.iterdir():
        _flush(each)
    sync_folder(path)


def _swapped(one: Path, other: Path) -> bool:
    """Swap two names at once; False where the system or the file system can't."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def _rename_over(staging: Path, path: Path) -> None:
    """Put a file or folder in the place of another; a replaced folder is removed last. Where the system can't swap two
    folders, a kill between two renames leaves the old one beside its place, under the name of ``aside``."""
    if not (staging.is_dir() and path.exists()):
        staging.replace(path)
        return
    if _swapped(staging, path):
        remove(staging)
        return
    aside = staging.with_name(f"{staging.name}.before")
    path.rename(aside)
    try:
        staging.rename(path)
    except OSError:
        aside.rename(path)
        raise
    remove(aside)
