"""Functions for worker processes to run; importable there by name."""

import os
import signal
import time


def echo(value):
    return value


def hang(_value=None):
    while True:
        pass


def hold_the_interpreter(_value=None):
    return len(str(9 ** (9**9)))


def sleep(seconds):
    time.sleep(seconds)
    return "woke"


def die(_value=None):
    os.kill(os.getpid(), signal.SIGSEGV)


def meet(folder, name, other):
    """Return once the other call has also begun."""
    open(os.path.join(folder, name), "w").close()
    ends = time.monotonic() + 100
    while not os.path.exists(os.path.join(folder, other)):
        assert time.monotonic() < ends, "the other call doesn't run"
        time.sleep(0.01)
    return name


def die_once(path):
    if os.path.exists(path):
        return "survived"
    open(path, "w").close()
    os._exit(3)


def eat_memory(_value=None):
    return len(bytearray(1 << 40))


def recurse(value=0):
    return recurse(value + 1)


def raise_bug(_value=None):
    raise KeyError("a bug of the grader")


def chatter(value):
    print("noise on standard output", flush=True)
    os.write(1, b"more noise\n")
    return value


def process_id():
    return os.getpid()


def broken_prepare():
    raise ImportError("no such library here")


def exit_in_prepare():
    os._exit(5)


def exit_in_prepare_where_asked():
    if "WHET_TEST_BROKEN" in os.environ:
        os._exit(5)


def slow_prepare():
    time.sleep(60)


def leave(status):
    raise SystemExit(status)


def fork():
    """Fork; both processes return a result. The worker's is the fork's process id, once the fork has ended."""
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
    return copy
