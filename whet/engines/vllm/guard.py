"""A small process that waits for the end of the process that an engine belongs to, however that happens, and then ends
the engine's. (vLLM's own processes would stay, or wait for minutes, when their owner is killed.) Linux only.

    python -m whet.engines.vllm.guard OWNER MARK
"""

import os
import select
import subprocess
import sys
import time

import psutil

MARK = "WHET_ENGINE_MARK"
"""The environment variable by which an engine's processes are found; it is in the environment they are born with."""


def start_guard(mark: str) -> "subprocess.Popen[bytes]":
    """Start a guard for this process. Kill it once the engine has ended."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), mark]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _guard(owner: int, mark: str) -> None:
    if os.getppid() == owner:
        select.select([os.pidfd_open(owner)], [], [])  # readable when it ends
    for _ in range(20):  # a process that is just being born may not have its environment yet
        for process in marked(mark):
            process.kill()
        time.sleep(0.5)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of the engine."""
    found = []
    for process in psutil.process_iter():
        try:
            tracker = "resource_tracker" in " ".join(process.cmdline())  # it removes shared memory, then ends by itself
            if process.environ().get(MARK) == mark and not tracker:
                found.append(process)
        except psutil.Error:  # it has ended, or is not ours
            continue
    return found


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
