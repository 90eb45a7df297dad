"""The working folder of a command, as the tar archives that runtimes take: unpacked before it starts, packed after all
of its processes have ended."""

import io
import os
import stat
import tarfile
from pathlib import Path

from whet.shells.runtime import FileProblem

_MOST_FILES = 20_000


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of a task's archive into a new folder."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def pack(folder: Path, most: int) -> bytes:
    """Return the folders, regular files and links in a folder, of at most ``most`` bytes together. Raises
    ``FileProblem`` for more, and for files that can't be read. Links are not followed."""
    if folder.is_symlink() or not folder.is_dir():
        raise FileProblem("the work folder is not a folder")
    buffer, size, count = io.BytesIO(), 0, 0
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for place, folders, files in os.walk(folder, onerror=_raise):
                for path in (Path(place, name) for name in sorted([*folders, *files])):
                    facts = path.lstat()
                    count, size = count + 1, size + (facts.st_size if stat.S_ISREG(facts.st_mode) else 0)
                    if count > _MOST_FILES or size > most:
                        raise FileProblem(f"the work folder has more than {_MOST_FILES} files or {most >> 20} MiB")
                    name = str(path.relative_to(folder))
                    if stat.S_ISREG(facts.st_mode):
                        _add_file(tar, path, name)
                    elif stat.S_ISDIR(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
                        tar.add(path, name, recursive=False)
    except (OSError, ValueError) as problem:
        raise FileProblem(str(problem)) from None
    return buffer.getvalue()


def _add_file(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a regular file as itself, also one that has several names."""
    member = tarfile.TarInfo(name)
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        member.size, member.mode = facts.st_size, stat.S_IMODE(facts.st_mode)
        tar.addfile(member, file)


def _raise(problem: OSError) -> None:
    raise problem
