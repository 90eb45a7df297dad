"""The lineage of a run or an export: ``lineage.json`` in its folder.

A record names everything that was read, with digests, and contains the record of whatever made it: the prepared data
with their sources, the export with its run. So one file has the whole history, even when the folders it names are gone.
"""

import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from whet.base.digests import unchanged
from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.config import Config
from whet.config.tree import from_plain
from whet.config.validation import issues_of

log = logging.getLogger(__name__)

FILE = "lineage.json"
PREPARED = "manifest.json"  # of a folder that ``whet prep`` wrote
Kind = Literal["run", "export", "prep", "files"]

_PACKAGES = ("whet", "torch", "transformers")
_ABOVE = 3  # folders above a file in which the record of its maker may lie, as in RUN/checkpoints/step-000050/policy


class Input(Config):
    """Something that was read."""

    setting: str
    """The setting that names it, as in ``data.path``; for prepared data the name of a source."""
    name: str
    """The path or id that the setting has."""
    files: dict[str, str] = Field(default={})
    """Digest of each file by its absolute path; empty for data that are generated or come over a network."""
    licence: str = ""
    revision: str = ""
    """The commit of a model of the Hugging Face Hub; the digest of a checkpoint's manifest."""
    maker: "Record | None" = None
    """The record of the run, export or preparation that made the files."""

    @property
    def title(self) -> str:
        """Return the name with the revision, for people."""
        return f"{self.name} ({self.revision})" if self.revision else self.name

    @property
    def digest(self) -> str:
        """Return the digest of the file; of several files, of their digests and names; empty without files."""
        if len(self.files) < 2:
            return next(iter(self.files.values()), "")
        lines = sorted(f"{value}  {Path(file).name}\n" for file, value in self.files.items())
        return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"

    def problems(self, reader: str) -> list[str]:
        """Return a line for each file that is missing or was changed since the ``reader`` read it."""
        lines = (_problem(Path(file), expected, f"since the {reader} read it") for file, expected in self.files.items())
        return [line for line in lines if line]

    def unlike_made(self) -> list[str]:
        """Return a line for each file that was changed, or is missing, since its maker wrote it."""
        if self.maker is None:
            return []
        lines, kind = list[str](), self.maker.kind
        read = {Path(file).name: value for file, value in self.files.items()}
        for name, made in self.maker.outputs.items():
            if name not in read and fnmatch(name, Path(self.name).name):
                lines.append(f"{name} is missing; the {kind} wrote it")
            elif read.get(name, made) != made:
                lines.append(f"{name} was changed since the {kind} wrote it")
        return [f"{self.setting}: {Path(self.maker.folder) / line}" for line in lines]


class Session(Config):
    """A start or a resume of a process."""

    began: str
    """Time, in UTC."""
    command: str
    versions: dict[str, str]
    commit: str
    """The git commit of the working folder, with a plus sign if files differ from it; empty without git."""

    @classmethod
    def now(cls) -> Self:
        """Return the facts of this process."""
        program = Path(sys.argv[0]) if sys.argv else Path()
        name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
        command = " ".join([name, *map(shlex.quote, sys.argv[1:])])
        began = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(began=began, command=command, versions=_versions(), commit=_commit())


class Record(Config):
    """The inputs and outputs of a run, an export or a preparation."""

    format: Literal[1] = 1
    kind: Kind
    folder: str
    """The absolute path of the run, the export, the prepared data, or of other files."""
    sessions: tuple[Session, ...] = Field(default=())
    """The processes that worked on it, the first one first."""
    seed: int | None = None
    recipe: str = ""
    """Digest of the settings as a run resolved them."""
    step: int | None = None
    """Of an export: the step of the checkpoint that it was made from."""
    inputs: tuple[Input, ...] = ()
    outputs: dict[str, str] = Field(default={})
    """Digest of each file that an export or a preparation made, by its path in the folder."""

    def write(self, folder: Path) -> None:
        """Write the record into a folder."""
        write_atomically(folder / FILE, json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n")

    def problems(self) -> list[str]:
        """Return a line for each file of the record that is missing or was changed, without its makers' files."""
        read = [f"{each.setting}: {line}" for each in self.inputs for line in each.problems(self.kind)]
        return [*read, *self.changed_outputs()]

    def replaced(self, inputs: "Iterable[Input]") -> list[str]:
        """Return a line for each input in whose place the record last has another one with other files."""
        last, lines = {each.setting: each for each in self.inputs}, list[str]()
        for each in inputs:
            before = last.get(each.setting, each)
            if before.title != each.title and (not each.digest or each.digest != before.digest):
                lines.append(
                    f"{each.setting}: the {self.kind} read {before.title} so far, and continues with {each.title}, "
                    "which is not the same"
                )
        return lines

    def changed_outputs(self) -> list[str]:
        """Return a line for each file that is missing or was changed since it was made."""
        folder, since = Path(self.folder), f"since the {self.kind} wrote it"
        return [line for name, made in self.outputs.items() if (line := _problem(folder / name, made, since))]

    def same(self, other: "Record") -> bool:
        """Return whether both describe the same run, export or preparation, which may have been moved meanwhile."""
        together = self.sessions[:1] == other.sessions[:1] if self.sessions else False
        return self.kind == other.kind and (self.folder == other.folder or together)

    def history(self) -> "Iterable[Record]":
        """Yield the record and, depth first, the records of everything that it was made from."""
        yield self
        for source in self.inputs:
            if source.maker is not None:
                yield from source.maker.history()


def read_record(folder: Path) -> Record | None:
    """Return the record of a run or export, or of prepared data; None if the folder has none. Raises ``DataError`` for
    a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return _of_prepared(folder)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__} in place of an object")
        record = Record.from_values(values)
    except ValidationError as error:
        issue = issues_of(error, Record, from_plain(values))[0]
        raise DataError(f"{path} is damaged: {issue.key}: {issue.message}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {_first_line(error)}") from None
    return record.model_copy(update={"folder": str(folder.resolve())})  # it may have been moved or copied


def maker_of(files: Iterable[Path], besides: Path | None = None) -> Record | None:
    """Return the record of the folder that holds the files, or is a little above them. ``besides``: a folder that does
    not count, because its record is being made. A damaged record is logged, and does not count."""
    folders = {file.parent for file in files}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    for candidate in (folder, *folder.parents[:_ABOVE]):
        if besides is not None and candidate.resolve() == besides.resolve():
            return None
        try:
            record = read_record(candidate)
        except DataError as error:
            log.warning("%s; the origin of %s is not recorded", error, folder)
            return None
        if record is not None:
            return record
    return None


def _of_prepared(folder: Path) -> Record | None:
    """Return the manifest of prepared data as a record. Other files of this name, as checkpoints have, don't count."""
    path = folder / PREPARED
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not {"sources", "splits", "settings"} <= manifest.keys():
            return None
        inputs = []
        for name, tally in manifest["sources"].items():
            files = {file: f"sha256:{value}" for file, value in tally["files"].items() if file.startswith(os.sep)}
            where = manifest["settings"]["sources"][name]["rows"]["path"]
            inputs.append(Input(setting=name, name=where, files=files, licence=tally["licence"]))
        outputs = {
            name: f"sha256:{facts['sha256']}" for split in manifest["splits"].values() for name, facts in split.items()
        }
        seed = manifest["settings"]["seed"]
        return Record(kind="prep", folder=str(folder.resolve()), seed=seed, inputs=tuple(inputs), outputs=outputs)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {_first_line(error)}") from None


def _problem(path: Path, expected: str, since: str) -> str:
    """Return what is wrong with a file, or an empty text."""
    try:
        status = path.stat()
        same = _unchanged(path, expected, status.st_size, status.st_mtime_ns)
        return "" if same else f"{path} was changed {since}"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"


@lru_cache(maxsize=10_000)
def _unchanged(path: Path, expected: str, size: int, modified: int) -> bool:
    """A history names the same file several times: it is read once while its size and time are the same."""
    return unchanged(path, expected)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
