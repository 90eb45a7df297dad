"""A local runtime: honest commands work, hostile ones are named and harm nothing, and nothing is left behind. Each
hostile command runs within small limits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.fault_contract import eventually
from tests.contracts.runtime_contract import LIMITS, RuntimeContract, text
from whet.base.errors import ConfigError
from whet.shells import inside
from whet.shells import local as module
from whet.shells.local import Local, LocalRuntime, _problem
from whet.shells.runtime import RuntimeFailure

pytestmark = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalRuntime]:
    opened = Local(limits=LIMITS).open()
    yield opened
    opened.close()


@pytest.fixture
def runtime(shared: LocalRuntime) -> LocalRuntime:
    shared.run("chmod -R u+rwx . ; rm -rf ..?* .[!.]* *")
    return shared


class TestContract(RuntimeContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls) -> Local:
        return Local(limits=LIMITS)


SECRETS = {
    "the run's home folder": f"ls {Path.home()} | wc -l",
    "the checkout": f"cat {Path(__file__)} | wc -l",
    "installed packages": "python3 -c 'import whet, pydantic' 2>/dev/null && echo 1 || echo 0",
    "other processes": f"test -e /proc/{os.getpid()}/root/etc && echo 1 || echo 0",
    "the network": "ls /sys/class/net 2>/dev/null | wc -l",
}


@pytest.mark.parametrize("what", SECRETS)
def test_nothing_of_the_run_can_be_read(runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("WHET_TEST_SECRET", "secret")
    assert text(runtime.run(f"({SECRETS[what]}) 2>/dev/null")) == "0\n"


FORKS = b"""
import os, time
for count in range(100):
    try:
        if not os.fork():
            time.sleep(100)
    except OSError as error:
        print(count, error.strerror)
        break
"""


def test_processes_are_bounded(runtime: LocalRuntime) -> None:
    runtime.write("forks.py", FORKS)
    count, _, problem = text(runtime.run("python3 forks.py")).partition(" ")
    assert int(count) < LIMITS.processes
    assert problem == "Resource temporarily unavailable\n"
    runtime.run("f() { f | f & }; f; sleep 1000", seconds=1)
    # Killed processes are gone once process 1 has waited for them. What remains is process 1, bash, ls and wc.
    left = "for try in {1..100}; do n=$(ls -d /proc/[0-9]* | wc -l); ((n <= 5)) && break; sleep 0.1; done; echo $n"
    assert text(runtime.run(left)) in ("4\n", "5\n")


def test_memory_is_bounded(runtime: LocalRuntime) -> None:
    one = "python3 -c 'x = bytearray(300 << 20)' 2>&1 | tail -n 1"
    assert text(runtime.run(one)) == "MemoryError\n"
    several = "for i in 1 2 3 4 5; do python3 -c 'import time; x = bytearray(100 << 20); time.sleep(100)' & done; wait"
    assert runtime.run(several).ending == "memory"


# Takes memory that its forks read; without forks, keeps it.
SHARES = b"""
import mmap, os, sys, time
forks, memory = int(sys.argv[1]), mmap.mmap(-1, 100 << 20)
for _ in range(100):
    memory.write(bytes(1 << 20))
for _ in range(forks):
    if not os.fork():
        sum(memory[::4096])
        time.sleep(0.5)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(forks)]
print(*statuses, flush=True)
if not forks:
    time.sleep(100)
"""


def test_memory_that_processes_could_share_is_bounded_and_counts_once(runtime: LocalRuntime) -> None:
    runtime.write("shares.py", SHARES)
    assert text(runtime.run("python3 shares.py 4")) == "0 0 0 0\n"
    assert runtime.run("for i in 1 2 3 4 5; do python3 shares.py 0 & done; wait").ending == "memory"


def test_a_process_whose_share_the_kernel_does_not_tell_counts_whole(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython3\nRssAnon:\t  700 kB\nRssFile:\t 50 kB\nRssShmem:\t  300 kB\n")
    assert inside._share(tmp_path) == 1000
    (tmp_path / "smaps_rollup").write_text("1-2 ---p 0 00:00 0 [rollup]\nPss_Anon:   600 kB\nPss_Shmem:  100 kB\n")
    assert inside._share(tmp_path) == 700


def test_the_number_of_files_is_bounded(runtime: LocalRuntime) -> None:
    assert b"No space left" in runtime.run("seq 99999 | xargs touch").output
    assert text(runtime.run("find . -delete; echo alive > file; cat file")) == "alive\n"


@pytest.mark.parametrize(
    "command",
    ["unshare -U true", "mount -t tmpfs x /tmp", "python3 -c 'import socket; socket.socket()'", "chroot . /bin/true"],
)
def test_forbidden_calls_fail(runtime: LocalRuntime, command: str) -> None:
    assert runtime.run(command).status not in (0, -9)


def test_a_runtime_whose_process_was_killed_is_a_failure_and_never_an_output() -> None:
    opened = Local(limits=LIMITS).open()
    os.kill(opened._child.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeFailure, match="shell of an episode failed"):
        opened.run("echo alive")
    opened.close()


def test_a_machine_that_cannot_isolate_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(ConfigError, match="user namespaces, a whole /proc, and bash"):
        Local().check()


@pytest.mark.parametrize("folder", ["/tmp", "/no/such/folder", "within /tmp"])
def test_a_folder_that_the_runtime_has_itself_is_not_readable_from_the_machine(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder outside of /tmp, /work, /tests and /logs"):
        Local(readable=(str(tmp_path) if folder == "within /tmp" else folder,)).check()


SCRIPT = """
import json, threading
from whet.shells.local import Local
runtimes = [Local().open() for _ in range(2)]
for runtime in runtimes:
    runtime.run("echo file > file")
    threading.Thread(target=runtime.run, args=("setsid sleep 31536 & sleep 31536", 1000)).start()
print(json.dumps([runtime._child.process.pid for runtime in runtimes]), flush=True)
threading.Event().wait()
"""


def _living(words: bytes) -> list[str]:
    living = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in place.read_bytes().replace(b"\0", b" "):
                living.append(place.parent.name)
        except OSError:
            continue
    return living


def test_a_killed_run_leaves_no_process_folder_or_mount(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    children = json.loads(owner.stdout.readline())
    assert eventually(lambda: len(_living(b"sleep 31536")) >= 4)
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not _living(b"sleep 31536"))
    assert eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert list(tmp_path.iterdir()) == []
    assert "/work tmpfs" not in Path("/proc/mounts").read_text()
