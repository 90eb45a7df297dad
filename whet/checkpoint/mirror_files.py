"""The files of a mirror, below a URL of fsspec: the markers of checkpoints, and the contents of files by SHA-256."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError
from whet.checkpoint.manifest import CheckpointError, Entry, Manifest, decode

PIECE = 8 << 20  # bytes that are read at a time

_MARKER = re.compile(r"step-(\d{6,})\.json")


class Remote:
    """The files below a URL."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.what = f"checkpoints.mirror: {url}"
        try:
            self._system, self._root = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(f"{self.what} needs a package that is not installed. {error} with pip") from None
        except Exception as error:
            raise ConfigError(f"{self.what} can't be used: {plain(error)}") from error

    @contextmanager
    def errors(self, kind: type[ConfigError] | type[CheckpointError]) -> Iterator[None]:
        """Turn errors of the file system, of many types, into one line."""
        try:
            yield
        except (ConfigError, CheckpointError):
            raise
        except Exception as error:
            advice = "check the address, the credentials and the network"
            raise kind(f"{self.what} can't be read and written: {plain(error)}; {advice}") from error

    def markers(self) -> dict[int, Manifest | None]:
        """Return the markers by step; None for one that is damaged."""
        markers: dict[int, Manifest | None] = {}
        for name in self._sizes(""):
            if match := _MARKER.fullmatch(name):
                step = int(match[1])
                try:
                    markers[step] = decode(self._system.cat_file(f"{self._root}/{name}"))
                except (ValueError, KeyError, TypeError):
                    markers[step] = None
        return markers

    def contents(self) -> dict[str, int]:
        """Return the sizes of all files that are there, by SHA-256."""
        return self._sizes("/files")

    def write(self, name: str, data: bytes) -> None:
        self._make("")
        self._system.pipe_file(f"{self._root}/{name}", data)

    def write_content(self, sha256: str, size: int, pieces: Iterator[bytes]) -> None:
        path = f"{self._root}/files/{sha256}"
        self._make("/files")
        with self._system.open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)
        if (there := self._system.info(path)["size"]) != size:
            raise OSError(f"{path} has {there} bytes instead of {size} after its upload")

    def download(self, entry: Entry, target: Path) -> None:
        """Write a file. Raises ``CheckpointError`` if it is missing or another."""
        target.parent.mkdir(parents=True, exist_ok=True)
        content = hashlib.sha256()
        try:
            with self._system.open(f"{self._root}/files/{entry.sha256}", "rb") as source, target.open("wb") as file:
                for piece in iter(partial(source.read, PIECE), b""):
                    content.update(piece)
                    file.write(piece)
        except FileNotFoundError:
            raise CheckpointError(f"files/{entry.sha256} ({target.name}) is missing") from None
        if content.hexdigest() != entry.sha256:
            raise CheckpointError(f"files/{entry.sha256} ({target.name}) has changed (SHA-256)")

    def remove(self, name: str) -> None:
        self._system.rm_file(f"{self._root}/{name}")

    def _make(self, below: str) -> None:
        """Make a folder, except in object stores, which have none and would make a bucket."""
        if self._root.startswith("/"):
            self._system.makedirs(f"{self._root}{below}", exist_ok=True)

    def _sizes(self, below: str) -> dict[str, int]:
        self._system.invalidate_cache()
        try:
            listed: list[dict[str, Any]] = self._system.ls(f"{self._root}{below}", detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] for each in listed if each["type"] == "file"}


def plain(error: BaseException) -> str:
    """Return an error of a file system in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
