"""A folder is written by one process at a time, completely or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from whet.base.errors import ConfigError, WhetError
from whet.base.staged_folder import staged_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, name: str = "new", failure: type[BaseException] | None = None) -> None:
    with staged_folder(path) as staging:
        (staging / name).touch()
        if failure is not None:
            raise failure


def killed(path: Path) -> None:
    """Write a folder in a process that is killed before it has ended."""
    code = f"""
import os, pathlib
from whet.base.staged_folder import staged_folder
with staged_folder(pathlib.Path({str(path)!r})) as staging:
    (staging / "half").mkdir()
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)


def test_a_folder_is_replaced_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "above" / "out"
    for name in ("old", "new"):
        write(path, name)
        assert names(path) == [name]
    with pytest.raises(KeyboardInterrupt):
        write(path, "half", KeyboardInterrupt)
    assert names(path) == ["new"]
    assert names(path.parent) == ["out"]


def test_another_process_is_refused_until_the_first_one_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with staged_folder(path) as staging:
        (staging / "first").touch()
        with pytest.raises(ConfigError, match="out is being written by another process; wait until it has ended"):
            write(path)
        write(tmp_path / "out2")
        assert names(staging) == ["first"]
    assert names(path) == ["first"]
    write(path)
    assert names(path) == ["new"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    killed(path)
    assert names(tmp_path) == [".out.staging"]
    write(path)
    assert names(path) == ["new"]
    assert names(tmp_path) == ["out"]


def test_a_file_in_the_place_of_the_temporary_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / ".out.staging").touch()
    with pytest.raises(WhetError, match=r"out can't be written: .*\.out\.staging"):
        write(tmp_path / "out")
