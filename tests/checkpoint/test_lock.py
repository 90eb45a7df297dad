"""One process per run folder."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.checkpoint.lock import run_lock

HOLD = (
    "import sys, time; from pathlib import Path; from whet.checkpoint.lock import run_lock\n"
    "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def assert_refused(folder: Path, words: str) -> None:
    for _ in range(2):  # who asks must not wipe out who holds it
        with pytest.raises(WhetError, match=words), run_lock(folder):
            pass


def test_a_second_process_is_told_who_holds_the_run_and_a_kill_frees_it(tmp_path: Path) -> None:
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


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    assert_refused(tmp_path, r"can't be locked: .*Is a directory: .*\.lock")


def test_a_forked_child_does_not_keep_the_run(tmp_path: Path) -> None:
    told, tell = os.pipe()
    with ExitStack() as holding:
        holding.enter_context(run_lock(tmp_path))
        child = os.fork()
        if child == 0:
            try:
                os.write(tell, b"x")
                time.sleep(60)
            finally:
                os._exit(0)
        try:
            assert os.read(told, 1) == b"x"  # the child runs, so it has let go
            assert_refused(tmp_path, "in use")  # the child's start released nothing
            holding.close()
            with run_lock(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
