"""The manifest of prepared data: where each row came from, what was dropped and why, and a hash of every file. It is
written last, so a folder with a manifest is complete.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whet.base.digests import sha256
from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.config.typed import check_types

FILE = "manifest.json"
_OF_PREP = {"settings", "sources", "splits"}  # keys that tell it from another program's file of this name


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
    columns: dict[str, int] = field(default_factory=dict)  # other columns that were kept -> rows, duplicates included
    left_out: dict[str, int] = field(default_factory=dict)  # other columns that were not -> rows, duplicates included
    copies: int = 0  # rows written beyond one for each kept row

    @property
    def reasons(self) -> str:
        """Return the dropped rows by reason, in words."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()) or "none"

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
    settings: JsonObject
    versions: dict[str, str]
    sources: dict[str, SourceTally] = field(default_factory=dict)
    splits: dict[str, dict[str, JsonObject]] = field(default_factory=dict)  # split -> file -> rows, sha256

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return sum(file["rows"] for file in self.splits.get(split, {}).values())

    def write(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path, force: bool = False) -> "Manifest | None":
        """Return the manifest of a folder; None if it has none. Raises ``DataError`` for one of another program, for a
        file in place of the folder and, unless ``force``, for one that is damaged."""
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; --out names the folder to write")
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not values.keys() >= _OF_PREP:
                raise DataError(f"{path} was not written by `whet prep`, which would replace it; choose another --out")
            check_types(cls, values)
            sources = {name: SourceTally(**tally) for name, tally in values.pop("sources").items()}
            return cls(**values, sources=sources)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if force:
                return None
            raise DataError(f"{path} is damaged ({error}); choose another --out, or replace it with --force") from None

    def difference(
        self, settings: JsonObject, versions: Mapping[str, str], files: Mapping[str, Mapping[str, str]]
    ) -> str:
        """Return in words how settings, versions and the hashes of each source's files differ from the manifest's."""
        texts = []
        before, after = dict(_leaves(self.settings)), dict(_leaves(settings))
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                texts.append(f"{key} was {before.get(key, 'absent')} and is {after.get(key, 'absent')}")
        for name, hashes in files.items():
            tally = self.sources.get(name, SourceTally())
            hashed = {Path(file).name: value for file, value in tally.files.items()}
            texts += [f"{file} has changed" for file, now in hashes.items() if hashed.get(Path(file).name, now) != now]
        for name, version in versions.items():
            if self.versions.get(name) != version:
                texts.append(f"{name} was {self.versions.get(name)} and is {version}")
        return f"it was prepared otherwise ({'; '.join(texts) or 'other files, or another --sample'})"

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


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested settings by their dotted keys."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{key}.{name}".lstrip("."))
