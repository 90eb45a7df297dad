"""A process that computes keeps the memory that it frees."""

import subprocess
import sys

import pytest

CODE = """
import resource, threading
from whet.processes.malloc import keep_freed_memory
if {keep}:
    keep_freed_memory()
faults = []
def work():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * (size << 20) for size in (200, 100, 40, 40)]
        del blocks
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*faults)
"""
PAGES = 380 * 256


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
@pytest.mark.parametrize("keep", [True, False])
def test_what_a_second_thread_frees_is_not_faulted_in_again(keep: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(keep=keep)], capture_output=True, text=True, timeout=60, check=True
    )
    first, *others = map(int, done.stdout.split())
    assert first > 0.9 * PAGES
    assert all(faults < 0.1 * PAGES for faults in others) == keep
