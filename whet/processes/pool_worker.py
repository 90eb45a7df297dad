"""The worker's side of a pool: a process that calls functions by name. Has few imports, so that workers start fast."""

import contextlib
import json
import os
import pickle
import resource
import time
import traceback

from whet.base.errors import WhetError
from whet.processes.child import Answer, resolve

OUT_OF_BOUNDS = 70  # exit status of a worker that ran out of memory or stack


def answering() -> Answer:
    """Return the request handler of a worker."""

    def answer(request: bytes | bytearray, *files: int) -> bytes:
        path, args, cpu_s = pickle.loads(request)
        if cpu_s is not None:
            # The kernel enforces this limit even while one long operation holds the interpreter.
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + cpu_s + 1)
        try:
            return json.dumps({"result": resolve(path)(*args, *files)}).encode()
        except (MemoryError, RecursionError):
            os._exit(OUT_OF_BOUNDS)
        except WhetError as error:
            return json.dumps({"error": str(error)}).encode()
        except BaseException:  # also an exit: a bug in the function, not caused by its arguments
            return json.dumps({"bug": traceback.format_exc(limit=-5)}).encode()

    return answer


def set_up(prepare: str | None, arguments: tuple[object, ...], memory: int | None) -> None:
    if memory is not None:
        _limit(resource.RLIMIT_AS, memory)
    if prepare is not None:
        resolve(prepare)(*arguments)


def _limit(kind: int, value: int) -> None:
    """Lower a soft limit. On systems without this limit only the wall-clock deadline applies."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
