"""A process that has imported some modules and never others, whose forks run programs at once."""

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from tests.early import fork_program

SECONDS = 300  # after which a program is killed

# A fork ends without the destructors of all that was imported, which would copy each page of its memory. For the same
# reason, the garbage collector leaves alone what was imported.
SERVE = """
import atexit, gc, json, os, signal, sys, threading, traceback

def run(code, arguments, folder, outputs, environment, seconds):
    signal.alarm(seconds)
    for number, path in enumerate([os.devnull, outputs + "/stdout", outputs + "/stderr"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    status = 0
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

gc.collect()
gc.freeze()
for line in sys.stdin:
    pid = os.fork() or run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Ancestor:
    """Ends when it is not referenced any more."""

    def __init__(self, imports: str, early: bool = False, **environment: str) -> None:
        """``imports``: the code that runs before the first fork; ``environment`` is added to this process's. ``early``:
        it is a fork itself, of this process."""
        code = imports + SERVE
        (asked, ask), (answered, answer) = os.pipe(), os.pipe()
        with os.fdopen(asked), os.fdopen(answer, "w"), open(os.devnull, "w") as errors:
            streams = asked, answer, errors.fileno()
            if early:
                wait = partial(os.waitpid, fork_program(code, streams=streams), 0)
            else:
                command = [sys.executable, "-c", code]
                wait = subprocess.Popen(command, -1, None, *streams, env={**os.environ, **environment}).wait
        self._ask, self._answers = os.fdopen(ask, "w"), os.fdopen(answered)
        weakref.finalize(self, _end, self._ask, wait)

    def run(self, code: str, *arguments: str, folder: Path, **environment: str) -> CompletedProcess[str]:
        """Run ``python -c CODE ARGUMENTS`` in ``folder``; ``environment`` is added to this process's."""
        with tempfile.TemporaryDirectory() as outputs:
            program: dict[str, object] = {
                "code": code,
                "arguments": arguments,
                "folder": str(folder),
                "outputs": outputs,
            }
            program |= {"environment": {**os.environ, **environment}, "seconds": SECONDS}
            self._ask.write(json.dumps(program) + "\n")
            self._ask.flush()
            status = self._answers.readline()
            assert status, "the process that forks programs has ended"
            texts = [(Path(outputs) / name).read_text() for name in ("stdout", "stderr")]
        return CompletedProcess(code, int(status), *texts)


def _end(ask: IO[str], wait: Callable[[], object]) -> None:
    ask.close()
    wait()
