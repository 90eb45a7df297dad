"""The command line in a fork of a process that has imported everything, which takes seconds in each new one."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.parallel.cases", "whet.run.run"])


def whet(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """``whet ARGUMENTS`` with what is added to the environment, run to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        printed = [Path(scratch) / name for name in ("stdout", "stderr")]
        work = (arguments, {**os.environ, **environment}, os.getcwd(), printed)
        process = PROCESSES.Process(target=_main, args=work, daemon=False)
        process.start()
        process.join(480)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        out, err = (path.read_text() for path in printed)
    if late:
        raise subprocess.TimeoutExpired(["whet", *arguments], 480, out, err)
    return subprocess.CompletedProcess(["whet", *arguments], process.exitcode or 0, out, err)


def _main(arguments: tuple[str, ...], environment: dict[str, str], folder: str, printed: list[Path]) -> None:
    from whet.cli.main import main

    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["whet", *arguments]
    main()
