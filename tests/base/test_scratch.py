"""Temporary folders end with their process, and the folders of killed processes are removed by the next one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from whet.base.scratch import Scratch, remove_scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    return tmp_path


@contextmanager
def elsewhere(body: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process that has created a folder, whose path it has written to its output; it waits for input."""
    code = f"import os, sys\nfrom whet.base.scratch import Scratch\n{body}\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


CREATE = "folder = Scratch('ranks'); (folder.path / 'store').touch(); print(folder.path, flush=True)"


def test_a_folder_is_private_and_removed_at_the_end_of_its_block(temporary: Path) -> None:
    with suppress(KeyError), Scratch("prep") as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "some").mkdir()
        raise KeyError
    assert not list(temporary.iterdir())


def test_a_folder_is_removed_when_its_process_exits_and_by_no_fork(temporary: Path) -> None:
    fork = "if not (pid := os.fork()): sys.exit()\nos.waitpid(pid, 0); print(folder.path.exists(), flush=True)"
    with elsewhere(f"{CREATE}\n{fork}") as process:
        folder = Path(line(process))
        assert line(process) == "True"
        process.communicate("\n")
    assert not folder.exists()


def test_an_exit_that_skips_the_cleaning_of_python_can_remove_them(temporary: Path) -> None:
    first, second = Scratch("ranks"), Scratch("ray")
    remove_scratch()
    assert not list(temporary.iterdir())
    first.remove()
    second.remove()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_and_no_other_is(temporary: Path) -> None:
    unrelated = [temporary / "whet-tmp-note", temporary / "mine"]
    unrelated[0].touch()
    unrelated[1].mkdir()
    (temporary / "whet-tmp-link").symlink_to(unrelated[1])
    with elsewhere(CREATE) as living, elsewhere(CREATE) as killed:
        kept, left = Path(line(living)), Path(line(killed))
        killed.kill()
        killed.wait()
        assert (left / "store").exists()
        with Scratch("prep") as folder:
            assert set(temporary.iterdir()) == {*unrelated, temporary / "whet-tmp-link", kept, folder}
        assert (kept / "store").exists()


def test_a_folder_that_machines_share_is_cleaned_of_the_same_purpose_only(tmp_path: Path) -> None:
    create = "print(Scratch(sys.argv[2], Path(sys.argv[1])).keep(), flush=True)"
    for purpose in ("weights-here", "weights-there"):
        with elsewhere(f"from pathlib import Path\n{create}", str(tmp_path), purpose) as process:
            assert line(process) == "None"
    with Scratch("weights-here", tmp_path) as folder:
        (left,) = set(tmp_path.iterdir()) - {folder}
        assert left.name.startswith("whet-tmp-weights-there-")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
def test_the_folder_of_another_user_is_not_removed(temporary: Path) -> None:
    other = temporary / "whet-tmp-ranks-other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with Scratch("ranks"):
        assert other.exists()
