"""User code that ends, replaces or holds the process causes a message and a nonzero exit code; signals are obeyed."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.contracts.fault_contract import eventually
from whet.processes.sentinel_process import core_waits, held_at

HOLD = "re.match('(a+)+$', 'a' * 60 + 'b')"
SLEEP = "ctypes.PyDLL(None).sleep(3600)"
WRITE = "ctypes.PyDLL(None).write(os.open({fifo!r}, os.O_WRONLY), bytes(1 << 20), 1 << 20)"  # more than fits
HELD = [pytest.param(HOLD, id="regular expression", marks=pytest.mark.slow), pytest.param(SLEEP, id="C sleep")]

PROGRAM = """
import asyncio, ctypes, os, posix, re, signal, sys, threading, time
from whet.processes.loop_thread import LoopThread
from whet.processes.sentinel import endings_are_errors, watched

async def user():
    {does}

async def main():
    with watched("Resume with: X", limit={limit}):
        thread = LoopThread("user")
        print("ready", flush=True)
        await thread.run(user)
        await thread.close()

with endings_are_errors():
    asyncio.run(main())
print("finished")
"""


def started(folder: Path, does: str, limit: float = 600.0) -> "subprocess.Popen[str]":
    script = folder / "script.py"
    script.write_text(PROGRAM.format(does=does, limit=limit))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def ended(folder: Path, does: str, limit: float = 600.0) -> tuple[int, str]:
    with started(folder, does, limit) as process:
        try:
            printed, _ = process.communicate(timeout=300)
        finally:
            process.kill()
        return process.returncode, printed


def test_what_does_nothing_ends_as_it_would_without(tmp_path: Path) -> None:
    assert ended(tmp_path, "pass") == (0, "ready\nfinished\n")


@pytest.mark.parametrize(
    "does",
    [
        "os._exit(0)",
        "os._exit(3)",
        "os.execv('/bin/true', ['true'])",
        "os.execve('/bin/true', ['true'], {})",
        "os.execvp('true', ['true'])",
        "os.execl('/bin/true', 'true')",
        "os.execlp('true', 'true')",
    ],
)
def test_what_would_end_or_replace_the_process_is_an_error_of_the_code_that_asks(does: str, tmp_path: Path) -> None:
    code, printed = ended(tmp_path, does)
    assert code == 1
    assert f"code of the run called {does[:7]}" in printed
    assert "script.py:7" in printed


def test_copies_of_the_process_end_and_become_programs_as_they_like(tmp_path: Path) -> None:
    does = (  # Python 3.12 and later warn of copies of a process with threads
        "import warnings; warnings.simplefilter('ignore'); assert os.spawnl(os.P_WAIT, '/bin/true', 'true') == 0"
        "; child = os.fork() or os._exit(5); assert os.waitpid(child, 0)[1] == 5 << 8"
    )
    assert ended(tmp_path, does) == (0, "ready\nfinished\n")


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("posix._exit(4)", 4),
    ],
)
def test_a_process_that_is_gone_is_told_of(does: str, code: int, tmp_path: Path) -> None:
    got, printed = ended(tmp_path, does)
    assert got == code
    assert "ended without a message" in printed
    assert printed.rstrip().endswith("Resume with: X")


def test_a_process_that_became_another_program_behind_our_back_is_ended_in_words(tmp_path: Path) -> None:
    code, printed = ended(tmp_path, "posix.execv('/bin/sleep', ['sleep', '600'])")
    assert code == -signal.SIGKILL
    assert "was replaced by another program" in printed


@pytest.mark.parametrize("does", HELD)
def test_code_that_holds_the_interpreter_is_named_and_the_process_ended(does: str, tmp_path: Path) -> None:
    code, printed = ended(tmp_path, does, limit=12.0)
    assert code == -signal.SIGKILL
    assert "warning: the interpreter has been held for 10 s at " in printed
    assert "error: the interpreter has been held for 12 s at " in printed
    assert printed.count(f"{tmp_path}/script.py:7 in user;") == 1
    assert printed.rstrip().endswith("Resume with: X")


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_whose_interpreter_is_held(one: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with started(tmp_path, WRITE.format(fifo=str(fifo))) as process, fifo.open("rb", buffering=0) as pipe:
        try:
            assert pipe.read(1)  # it is being written, with the interpreter held
            process.send_signal(one)
            printed, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    if one is signal.SIGTERM:  # not handled here
        assert process.returncode == -one
    else:
        assert process.returncode == -signal.SIGKILL
        assert (
            f"a signal arrived, and the interpreter has been held for 10 s at {tmp_path}/script.py:7 in user:"
            in printed
        )


def test_an_interrupt_of_code_that_only_waits_is_python_s_own(tmp_path: Path) -> None:
    with started(tmp_path, "await asyncio.sleep(3600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            printed, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode in (1, -signal.SIGINT)
    assert "KeyboardInterrupt" in printed
    assert "held" not in printed


def test_a_pause_is_not_taken_for_an_interpreter_that_is_held(tmp_path: Path) -> None:
    with started(tmp_path, "await asyncio.sleep(2)", limit=3.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        printed, _ = process.communicate(timeout=300)
    assert (process.returncode, printed) == (0, "finished\n")


def test_the_time_that_a_thread_waits_for_a_core_is_known() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()\nwhile True: pass"]
    core = min(os.sched_getaffinity(0))
    rivals = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for rival in rivals:
            os.sched_setaffinity(rival.pid, {core})
            assert rival.stdout is not None
            assert rival.stdout.readline()
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write(b"\n")
            rival.stdin.flush()
        # They share one core.
        assert eventually(lambda: max(sum(core_waits(rival.pid).values()) for rival in rivals) > 0.3)
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()
    assert core_waits(rivals[0].pid) == {}


def test_the_place_is_that_of_code_and_not_of_what_waits() -> None:
    whet, python = Path(__file__).parents[2] / "whet", sysconfig.get_path("stdlib")
    dump = f"""Thread 0x01 (most recent call first):
  File "{python}/threading.py", line 1 in wait

Thread 0x02 (most recent call first):
  File "{whet}/learner/passes.py", line 2 in learn

Thread 0x03 (most recent call first):
  File "{python}/re/__init__.py", line 3 in match
  File "{whet}/environments/math_grader.py", line 4 in grade
  File "{whet}/processes/loop_thread.py", line 5 in _run

Current thread 0x04 (most recent call first):
  File "{python}/selectors.py", line 6 in select
"""
    assert held_at(dump) == f"{whet}/environments/math_grader.py:4 in grade"
    assert held_at("") == "an unknown place"


STORM = """
import os, signal, sys, threading, time
from whet.processes.sentinel import watched

def deep(depth):
    return depth and deep(depth - 1)

def work():
    while not done:
        deep(20)
        [deep(3) for _ in range(10)]

def storm():
    for _ in range(200):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0005)
    done.append(True)

done, handled = [], []
signal.signal(signal.SIGINT, lambda *_: handled.append(True))
with watched():
    for body in (work, work, work, storm):
        threading.Thread(target=body).start()
    while not done:
        deep(30)
        time.sleep(0.0001)
print(len(handled) > 0)
"""


@pytest.mark.slow
def test_a_storm_of_signals_crashes_nothing(tmp_path: Path) -> None:
    """To write down the lines of running threads in a signal handler crashed the process within some hundred."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, timeout=300, env=environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")
