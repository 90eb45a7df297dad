"""A child answers requests, keeps its deadlines, and is never abandoned."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from tests.cluster.workers import alive
from tests.contracts.fault_contract import eventually
from whet.base.errors import DeadlineError, WorkerError
from whet.processes.child import Answer, Child, ChildDied, thread_settings

HERE = "tests.processes.test_child"


def acting() -> Answer:
    """Return the request handler of the children in these tests, which evaluates the request as an expression."""
    return lambda request: str(eval(request, {"os": os, "time": time})).encode()


@pytest.fixture
def child() -> Child:
    made = Child(f"{HERE}:acting")
    yield made
    made.kill()


def test_requests_are_answered_in_order_by_one_process(child: Child) -> None:
    assert [int(child.exchange(b"os.getpid()")) for _ in range(2)] == [child.process.pid] * 2
    big = child.exchange(b"'x' * 5_000_000", 60)
    assert bytes(big) == b"x" * 5_000_000
    assert child.exchange(b"len('" + bytes(big) + b"')") == b"5000000"


@pytest.mark.parametrize(
    ("request_", "how"),
    [(b"os.kill(os.getpid(), 11)", "was killed by SIGSEGV"), (b"os._exit(3)", "exited with status 3")],
)
def test_a_child_that_dies_says_how(child: Child, request_: bytes, how: str) -> None:
    with pytest.raises(ChildDied, match=how):
        child.exchange(request_, 60)
    with pytest.raises(WorkerError, match=how):
        child.exchange(b"1", 60)


@pytest.mark.parametrize("request_", [b"time.sleep(600)", b"x" * 5_000_000], ids=["late", "does not even read"])
def test_a_child_that_is_late_is_killed(child: Child, request_: bytes) -> None:
    child.exchange(b"1")
    if len(request_) > 100:
        os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"no reply within 0\.2 s"):
        child.exchange(request_, 0.2)
    assert not child.alive


def test_signals_to_all_processes_of_a_job_leave_the_end_of_a_child_to_its_owner(child: Child) -> None:
    child.exchange(b"1")
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.process.send_signal(sent)
    assert child.exchange(b"6 * 7") == b"42"


def test_killing_wakes_a_thread_that_waits_for_a_reply(child: Child) -> None:
    child.exchange(b"1")
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(ChildDied, match="SIGKILL"):
        child.exchange(b"time.sleep(60)")


def test_copies_that_a_child_made_of_itself_are_killed_with_it(child: Child) -> None:
    copy = int(child.exchange(b"os.fork() or time.sleep(600)"))
    assert alive(copy)
    child.kill()
    assert eventually(lambda: not alive(copy))


@pytest.mark.parametrize("starts", ["main", "thread"])
@pytest.mark.parametrize("state", ["idle", "holds the interpreter", "frozen"])
def test_a_child_dies_with_its_owner_and_not_with_the_thread_that_asked_for_it(starts: str, state: str) -> None:
    script = f"""
        import os, signal, threading, time
        from whet.processes.child import Child

        def start():
            global child
            child = Child("{HERE}:acting")

        if "{starts}" == "thread":
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        else:
            start()
        assert child.exchange(b"1", 60) == b"1"
        if "{state}" == "frozen":
            os.kill(child.process.pid, signal.SIGSTOP)
        if "{state}" == "holds the interpreter":
            threading.Thread(target=child.exchange, args=(b"9 ** (9 ** 9)",)).start()
            time.sleep(0.3)
        print(child.process.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.send_signal(signal.SIGKILL)
    assert eventually(lambda: not alive(pid))


def test_a_child_has_the_threads_and_cores_that_it_is_given() -> None:
    own = sorted(os.sched_getaffinity(0))[:1]
    child = Child(f"{HERE}:acting", environment=thread_settings(3), cores=own)
    try:
        assert child.exchange(b"os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY']") == b"('3', 'PASSIVE')"
        assert child.exchange(b"sorted(os.sched_getaffinity(0))") == str(own).encode()
    finally:
        child.kill()


def test_a_killed_process_that_does_not_end_is_awaited_only_for_a_while(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kill: Callable[[int, int], None] = os.killpg
    monkeypatch.setattr("whet.processes.child.KILL_S", 0.1)
    monkeypatch.setattr(os, "killpg", lambda group, _: kill(group, signal.SIGSTOP))  # as if the system held it
    child.kill()
    assert "still exists after 0.1 s" in caplog.text
    kill(child.process.pid, signal.SIGKILL)
    assert child.process.wait(20) == -signal.SIGKILL
