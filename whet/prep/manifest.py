"""The manifest of prepared data: where each row came from, what was dropped and why, and a hash of every file. It is
written last, so a folder with a manifest is complete.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet.base.digest import sha256
from whet.base.errors import DataError
from whet.base.files import write_atomically

FILE = "manifest.json"


@dataclass(slots=True)
class SourceTally:
    """The account of one source: rows read = rows kept + rows dropped; copies are counted apart."""

    licence: str = ""
    files: dict[str, str] = field(default_factory=dict)  # absolute path -> SHA-256
    read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first such row, with its problem
    kept: int = 0
    changed: dict[str, int] = field(default_factory=dict)  # what was done -> kept rows
    copies: int = 0  # rows written beyond one for each kept row

    def drop(self, reason: str, example: str = "") -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if example:
            self.examples.setdefault(reason, example)

    def check(self, name: str) -> None:
        """Raise ``DataError`` unless every row is accounted for."""
        if self.read != self.kept + sum(self.dropped.values()):
            account = f"{self.read} rows read, {self.kept} kept, dropped: {self.dropped}"
            raise DataError(f"{name}: {account}; the sum is wrong")


@dataclass(slots=True)
class Manifest:
    """See the module."""

    key: str  # hash of settings, versions and input files
    settings: dict[str, Any]
    versions: dict[str, str]
    sources: dict[str, SourceTally] = field(default_factory=dict)
    splits: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # split -> file -> rows, sha256

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return sum(file["rows"] for file in self.splits.get(split, {}).values())

    def write(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Return the manifest of a folder; None if it has none. Raises ``DataError`` for one that is damaged."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            sources = {name: SourceTally(**tally) for name, tally in values.pop("sources").items()}
            return cls(**values, sources=sources)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is damaged ({error}); prepare the data again with --force") from None

    def problems(self, folder: Path) -> list[str]:
        """Return what is missing or changed among the files of the folder."""
        texts = []
        for files in self.splits.values():
            for name, facts in files.items():
                path = folder / name
                if not path.is_file():
                    texts.append(f"{path} is missing")
                elif sha256(path) != facts["sha256"]:
                    texts.append(f"{path} was changed: its SHA-256 is not the one in {FILE}")
        return texts
