"""A process for code that may fork, block or eat memory: it has its own limits, and none of its children is left."""

import contextlib
import os
import resource
import signal
import subprocess
from pathlib import Path

CPU_S, MEMORY, PROCESSES = 120, 32 << 30, 2000


def limit() -> None:
    """Give this process its limits."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))  # threads, too; of no effect on root


def run_limited(command: list[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run to the end, or for at most ``seconds``. ``stdout`` has all output, errors included."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / "printed").open("w+") as printed:  # a pipe would stay open as long as a copy lives
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            preexec_fn=limit,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return subprocess.CompletedProcess(command, code, printed.read())
