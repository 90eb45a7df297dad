"""One process per run folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.checkpoint.lock import RunLock
from whet.errors import WhetError

HOLD = (
    "import sys, time; from pathlib import Path; from whet.checkpoint.lock import RunLock\n"
    "lock = RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
)


def test_a_second_process_is_told_who_holds_the_run_and_a_kill_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WhetError, match=f"in use by process {holder.pid} on "):
            RunLock(tmp_path).acquire()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_second_lock_in_the_same_process_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        with pytest.raises(WhetError, match=f"process {os.getpid()}"):
            RunLock(tmp_path / "run").acquire()
        with RunLock(tmp_path / "other"):
            pass
    with RunLock(tmp_path / "run") as lock:
        lock.release()
        lock.release()


def test_a_lock_taken_twice_is_a_mistake(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock, pytest.raises(RuntimeError, match="already held"):
        lock.acquire()


def test_a_forked_child_does_not_keep_the_run(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"x")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert os.read(told, 1) == b"x"  # the child runs, so it has let go
        with pytest.raises(WhetError):
            RunLock(tmp_path).acquire()  # the child's start released nothing
        lock.release()
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
