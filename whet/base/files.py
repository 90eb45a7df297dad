"""Atomic writes: a file or folder is written under a temporary name, flushed to disk and renamed. A reader, or the next
start after a kill, sees either the old content or the complete new content. Imports torch only for tensors.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.errors import ConfigError, WhetError

if TYPE_CHECKING:
    from torch import Tensor

_STAGED = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}")  # temporary names, with the process id


def expanded(path: str | Path) -> Path:
    """Return the path with the home folder in place of ``~``. As a shell does, and ``Path.expanduser`` does not, leave
    the name of an unknown user as it is (``~notes.txt``)."""
    return Path(os.path.expanduser(path))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path at which to create a file or folder. On success it replaces ``path``; on failure it is
    removed. Creates missing parent folders. Raises ``WhetError`` naming ``path`` for an ``OSError``.

    >>> with replacing(folder) as staging:
    ...     staging.mkdir()
    """
    with error_context(path):
        if not path.name:  # of "." and "/"
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        staging = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with moving(staging, path):
            yield staging


@contextmanager
def moving(staging: Path, path: Path) -> Iterator[None]:
    """Replace ``path`` by the file or folder ``staging``, flushed to disk, after the block; on failure remove it."""
    try:
        yield
        _flush(staging)
        _rename_over(staging, path)
    finally:
        with suppress(OSError):
            remove(staging)
    sync_folder(path.parent)


@contextmanager
def error_context(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` (disk full, read-only file system, path is a folder), also of a library written in Rust,
    into a ``WhetError`` that names ``path``."""
    try:
        yield
    except Exception as error:
        in_rust = None if isinstance(error, WhetError) else re.search(r"\(os error (\d+)\)", str(error))
        if not isinstance(error, OSError) and in_rust is None:
            raise
        number = int(in_rust[1]) if in_rust else getattr(error, "errno", None)
        # None: of numpy, for a file that became too short
        room = f"; {room_in(path.parent)}" if number in (None, errno.ENOSPC, errno.EDQUOT) else ""
        renamed = getattr(error, "filename2", None) is not None
        unmade = number in (errno.ENOENT, errno.EACCES, errno.EROFS) and f".{path.name}." in str(error)
        temporary = renamed or unmade  # the name of no file that the user could look at, as in .NAME.staging
        text = f"[Errno {number}] {os.strerror(number or 0)}" if temporary else str(error)
        raise WhetError(f"{path} can't be written: {text}{room}") from error


def room_in(folder: Path) -> str:
    """Return in words what is free in a folder or, if there is none yet, in the nearest folder above it."""
    near = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    status = os.statvfs(near)
    few = f", for {status.f_favail} further files (inodes)" if status.f_files and status.f_favail < 1000 else ""
    return f"{format_bytes(shutil.disk_usage(near).free)} are free in {near}{few}"


def check_writable(folder: Path) -> None:
    """Raise ``ConfigError`` if this process may not write into the folder or, if there is none yet, may not make it."""
    try:
        near = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    except PermissionError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}") from None
    if not near.is_dir() and near != folder.absolute():
        raise ConfigError(f"{folder} can't be written: {near} is a file, not a folder")
    if near.is_dir() and not os.access(near, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder} can't be written: you have no permission to write into {near}, or its file system is read-only"
        )


def check_unicode(text: str, what: str) -> None:
    """Raise ``ConfigError`` if a path or an argument has bytes that are not UTF-8: no file of whet's could name it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{what}: it has bytes that are not UTF-8; choose another name, or set PYTHONUTF8=1 where the name is "
            "right and the locale is not"
        ) from None


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file with ``replacing``; text is encoded as UTF-8."""
    with replacing(path) as staging:
        staging.write_bytes(data.encode() if isinstance(data, str) else data)


def append(path: Path, data: str) -> None:
    """Append to a file and flush it to disk. A kill may leave an incomplete last line, which readers must skip."""
    with error_context(path), path.open("a", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries, so that a rename or deletion survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left in a folder. Not recursive."""
    for path in folder.glob(".*"):
        match = _STAGED.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            with suppress(OSError):
                remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """Write a safetensors file with ``replacing``. Tensors may be on any device, strided, or share memory: each one is
    written in full."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != copy.nbytes:
            copy = copy.clone()
        seen.add(copy.untyped_storage().data_ptr())
        plain[name] = copy
    with replacing(path) as staging:
        save_file(plain, staging, {"format": "pt"})
        staging.chmod(0o644)  # safetensors writes 0600, which locks out other users of the run folder


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """Return a safetensors file's tensors by name, on the CPU. Raises ``WhetError`` if it is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise WhetError(f"{path} can't be read as safetensors: {error}; load another checkpoint") from error


def format_bytes(size: int) -> str:
    """Format a number of bytes for people.

    >>> format_bytes(1536 * 1024**2)
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


def _swapped(path: Path, other: Path) -> bool:
    """Swap two names atomically; return False where the system or the file system can't."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(path), here, os.fsencode(other), swap) == 0


def _rename_over(staging: Path, path: Path) -> None:
    """Replace a file or folder; a replaced folder is removed last. Where the system can't swap two folders, a kill
    between the two renames leaves the old folder under its ``.before`` name."""
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
