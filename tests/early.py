"""Servers of forks that are forks themselves: of a worker of pytest-xdist that has imported what they need and has not
collected tests. Started later, as each worker comes to need them, they would import torch and transformers again."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from unittest.mock import patch


def start_servers() -> None:
    from tests.checkpoint import without_whet

    if "whet" not in sys.modules:
        with _quiet():
            exec(without_whet.LIBRARIES)
        without_whet.ancestor()
    with _quiet():
        import tests.forks
        import tests.preloaded
    assert tests.forks.PROCESSES, tests.preloaded
    resource_tracker.ensure_running()
    with patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()


@contextmanager
def _quiet() -> Iterator[None]:
    """Libraries say on import what they miss."""
    errors = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    yield
    os.dup2(errors, 2)
    os.close(errors)


def _fork_server(_: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
    code, *words = command[command.index("-c") + 1 :]
    return fork_program(code, words, descriptors)


def fork_program(
    code: str, words: Sequence[str] = (), kept: Sequence[int] = (), streams: Sequence[int] = (0, 1, 2)
) -> int:
    """Start ``python -c CODE WORDS`` as a fork with these three streams and, of other open files, those to be kept."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for low, high in pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1) for number, mode in enumerate("rww"))
        sys.argv = ["-c", *words]
        forkserver._forkserver._lock = threading.Lock()  # the worker's is held
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
