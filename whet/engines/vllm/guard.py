"""A small process that waits for the end of an engine's owner, in any way, and then kills the engine's processes. (When
their owner is killed, vLLM's processes would otherwise stay, or wait for minutes.) Linux only.

    python -m whet.engines.vllm.guard OWNER MARK
"""

import os
import select
import subprocess
import sys
import time

import psutil

MARK = "WHET_ENGINE_MARK"
"""The environment variable that identifies an engine's processes; it is set in their initial environment."""


def start_guard(mark: str) -> "subprocess.Popen[bytes]":
    """Start a guard for this process. Kill it once the engine has ended."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), mark]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _guard(owner: int, mark: str) -> None:
    if os.getppid() == owner:
        select.select([os.pidfd_open(owner)], [], [])  # readable when the owner ends
    for _ in range(20):  # a new process may not have its environment yet
        for process in marked(mark):
            process.kill()
        time.sleep(0.5)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of the engine."""
    processes = []
    for process in psutil.process_iter():
        try:
            tracker = "resource_tracker" in " ".join(process.cmdline())  # it removes shared memory and then exits
            if process.environ().get(MARK) == mark and not tracker:
                processes.append(process)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return processes


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
