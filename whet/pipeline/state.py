"""The state of a pipeline's folder, ``pipeline.json``: for each stage the settings and the hashes of the inputs with
which it was begun, and whether it was finished. It is replaced atomically, before and after each stage, so a kill at
any moment loses nothing that was finished."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whet.base.digests import sha256
from whet.base.errors import ConfigError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.config.typed import check_types

FILE = "pipeline.json"


@dataclass(slots=True)
class Record:
    """A stage as it was begun last."""

    settings: JsonObject
    inputs: dict[str, str]  # reference or path -> hash
    finished: bool = False
    seconds: float = 0.0
    outputs: dict[str, str] = field(default_factory=dict)  # file, relative to the stage's folder -> hash
    result: str = ""
    values: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """See the module."""

    stages: dict[str, Record] = field(default_factory=dict)
    hashes: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # file -> size, time of change, SHA-256

    @classmethod
    def read(cls, folder: Path) -> "State":
        """Return the state of a folder, empty if it has none. Raises ``ConfigError`` for one that is damaged."""
        path = folder / FILE
        if not path.is_file():
            return cls()
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            check_types(cls, values)
            stages = {name: Record(**record) for name, record in values["stages"].items()}
            return cls(stages, {file: (size, at, text) for file, (size, at, text) in values["hashes"].items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); move it away, and choose another --folder") from None

    def write(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def hash(self, path: Path) -> str:
        """Return the hash of a file, which is read only if its size or time changed since the last time."""
        status = path.stat()
        size, at, digest = self.hashes.get(str(path), (-1, -1, ""))
        if (size, at) != (status.st_size, status.st_mtime_ns):
            digest = sha256(path)
            self.hashes[str(path)] = (status.st_size, status.st_mtime_ns, digest)
        return digest

    def hash_all(self, paths: Iterable[Path], root: Path) -> str:
        """Return a hash of files, with their names relative to ``root``."""
        return hashlib.sha256(json.dumps(self.hashed(paths, root), sort_keys=True).encode()).hexdigest()

    def hashed(self, paths: Iterable[Path], root: Path) -> dict[str, str]:
        """Return the hash of each file, by its name relative to ``root``."""
        return {str(path.relative_to(root)): self.hash(path) for path in paths}
