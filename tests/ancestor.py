"""A process that has imported some modules and never others, whose forks run programs at once."""

import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from subprocess import CompletedProcess

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

    def __init__(self, imports: str, **environment: str) -> None:
        """``imports``: the code that runs before the first fork; ``environment`` is added to this process's."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", imports + SERVE],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, self._process.communicate)  # closes its input

    def run(self, code: str, *arguments: str, folder: Path, **environment: str) -> CompletedProcess[str]:
        """Run ``python -c CODE ARGUMENTS`` in ``folder``; ``environment`` is added to this process's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            program: dict[str, object] = {
                "code": code,
                "arguments": arguments,
                "folder": str(folder),
                "outputs": outputs,
            }
            program |= {"environment": {**os.environ, **environment}, "seconds": SECONDS}
            self._process.stdin.write(json.dumps(program) + "\n")
            self._process.stdin.flush()
            status = self._process.stdout.readline()
            assert status, "the process that forks programs has ended"
            texts = [(Path(outputs) / name).read_text() for name in ("stdout", "stderr")]
        return CompletedProcess(code, int(status), *texts)
