"""Exported models under names with versions: ``artifact:policy:v3``, ``artifact:policy:latest``.

An artifact is a small file, ``artifacts/policy/v3.json``, that names the folder of the export and the digests of its
files. Nothing is copied. ``WHET_ARTIFACTS`` names another folder than ``artifacts`` in the working folder.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from whet.base.digests import unchanged
from whet.base.errors import ConfigError
from whet.base.files import error_context, expanded, sync_folder
from whet.config.issues import did_you_mean

PREFIX = "artifact:"

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*")
_VERSION = re.compile(r"v([1-9]\d*)")
_EDITED = (".md",)  # files that people change, and that no model reads


def artifacts_folder() -> Path:
    """Return the folder of the artifacts."""
    return expanded(os.environ.get("WHET_ARTIFACTS") or "artifacts")


def check_name(name: str) -> None:
    """Raise ``ConfigError`` if an artifact can't have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} can't be the name of an artifact: use letters, digits, '.', '_' and '-'")


def register(name: str, folder: Path, files: Mapping[str, str]) -> str:
    """Make a folder the next version of an artifact, and return that as in ``policy:v3``. ``files``: the digest of each
    file by its path in the folder. Processes that register at the same time get different versions."""
    check_name(name)
    versions = artifacts_folder() / name
    entry = {"format": 1, "folder": str(folder.resolve()), "files": dict(files)}
    staging = versions / f".{secrets.token_hex(8)}"
    with error_context(versions):
        versions.mkdir(parents=True, exist_ok=True)
        try:
            staging.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
            while True:
                version = f"v{max(_versions(name), default=0) + 1}"
                with suppress(FileExistsError):
                    os.link(staging, versions / f"{version}.json")  # fails if another process has made this version
                    break
        finally:
            staging.unlink(missing_ok=True)
        sync_folder(versions)
    return f"{name}:{version}"


def artifact_folder(reference: str) -> Path:
    """Return the folder of ``artifact:NAME:VERSION``, where the version is ``v3`` or ``latest``, which may be left out.
    Raises ``ConfigError`` if there is none, and if its files are lost or were changed."""
    name, _, version = reference.removeprefix(PREFIX).partition(":")
    check_name(name)
    root, versions = artifacts_folder(), _versions(name)
    listed = ", ".join(f"v{number}" for number in versions)
    if not versions:
        names = sorted(path.name for path in root.glob("*") if path.is_dir())
        all_names = f" Its artifacts: {', '.join(names)}." if names else ""
        raise ConfigError(f"{reference}: {root} has no artifact {name!r}.{did_you_mean(name, names)}{all_names}")
    if version in ("", "latest"):
        version = f"v{versions[-1]}"
    match = _VERSION.fullmatch(version)
    if match is None or int(match[1]) not in versions:
        raise ConfigError(f"{reference}: {name} has no version {version!r}; it has {listed}, and 'latest'")
    entry = root / name / f"{version}.json"
    try:
        value = json.loads(entry.read_text(encoding="utf-8"))
        folder, files = Path(value["folder"]), dict(value["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{reference}: {entry} is damaged ({error}); name another version of {listed}") from None
    if problem := _problem(folder, files):
        raise ConfigError(f"{reference} ({name}:{version}) {problem}; export it again, or name another of {listed}")
    return folder


def names_of(folder: Path) -> list[str]:
    """Return the artifacts that are this folder, as in ``policy:v3``."""
    names = []
    for entry in sorted(artifacts_folder().glob("*/v*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(entry.read_text(encoding="utf-8"))["folder"] == str(folder.resolve()):
                names.append(f"{entry.parent.name}:{entry.stem}")
    return names


def _versions(name: str) -> list[int]:
    """Return the versions of an artifact in order."""
    matches = (_VERSION.fullmatch(path.stem) for path in (artifacts_folder() / name).glob("v*.json"))
    return sorted(int(match[1]) for match in matches if match)


def _problem(folder: Path, files: Mapping[str, str]) -> str:
    if not folder.is_dir():
        return f"is lost: there is no folder {folder}"
    for name, digest in files.items():
        if name.endswith(_EDITED):
            continue
        path = folder / name
        try:
            if not unchanged(path, digest):
                return f"was changed: {path} is not the file that was exported"
        except OSError as error:
            return f"is not complete: {path}: {error.strerror}"
    return ""
