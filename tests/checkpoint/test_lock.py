"""One process per run folder."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.checkpoint import lock
from whet.checkpoint.lock import is_locked, run_lock

HOLD = (
    "import sys, time; from pathlib import Path; from whet.checkpoint.lock import run_lock\n"
    "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def assert_refused(folder: Path, words: str) -> None:
    for _ in range(2):  # a refused process must not overwrite the holder's id
        with pytest.raises(WhetError, match=words), run_lock(folder):
            pass


def test_a_second_process_gets_the_id_of_the_holder_and_a_kill_releases_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert_refused(tmp_path, f"in use by process {holder.pid} on ")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_second_lock_in_the_same_process_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"):
        assert_refused(tmp_path / "run", f"process {os.getpid()}")
        with run_lock(tmp_path / "other"):
            pass
    with run_lock(tmp_path / "run"):
        pass


def test_a_folder_in_place_of_the_lock_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    assert_refused(tmp_path, r"can't be locked: .*Is a directory: .*\.lock")


def test_processes_that_look_at_the_lock_are_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``whet runs`` and ``whet watch`` look at the locks of all runs, perhaps while one of them is resumed."""
    with run_lock(tmp_path):
        assert is_locked(tmp_path)
    with (tmp_path / ".lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert not is_locked(tmp_path), "a look does not use the folder"
        assert_refused(tmp_path, "in use")
        monkeypatch.setattr(lock, "_PATIENCE", 60.0)
        ends = threading.Timer(0.05, look.close)
        ends.start()
        with run_lock(tmp_path):
            assert is_locked(tmp_path)
        ends.join()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with ExitStack() as stack:
        stack.enter_context(run_lock(tmp_path))
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, b"x")
                time.sleep(60)
            finally:
                os._exit(0)
        try:
            assert os.read(reader, 1) == b"x"  # the child runs, so it has released its copy of the lock
            assert_refused(tmp_path, "in use")  # the parent still holds the lock
            stack.close()
            with run_lock(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
