"""Shared fixtures and options. One thread per process: tests start several on few cores, where threads that wait for
each other cost more than they bring."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["STUB_PYTHON"] = sys.executable  # of tests/shells/stub_engine.py; python3 may be a script that looks for one

import pytest
from hypothesis import settings

from whet.base.closing import abandoned_threads

# A failed assertion of a helper says what differs, like that of a test.
pytest.register_assert_rewrite(*(f"tests.{entry.stem}" for entry in Path(__file__).parent.iterdir()))

# The same examples each time: what passes here passes there. Others: --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None)  # a busy machine is slow
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run every N-th of the chosen tests, from the K-th (0) on")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background jobs; what tests start would, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # learners would take the GPUs, whose bits and ranks are not a CPU's


def pytest_sessionstart() -> None:
    """The garbage collector may run finalizers in a test's deepest recursion. They fail there, and pytest, which would
    warn of that, failed the test because it had no room on the stack either."""
    warn = sys.unraisablehook

    def warn_of_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RecursionError):
            warn(unraisable)

    sys.unraisablehook = warn_of_others


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the garbage collector need not look at their millions of objects each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part:
        index, count = (int(number) for number in part.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != index])
        items[:] = items[index::count]


@pytest.fixture(autouse=True)
def _no_thread_is_abandoned_for_the_next_test() -> Iterator[None]:
    """A thread that a test left hanging would have the command line of a later test end the whole process."""
    yield
    abandoned_threads.clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    from tests.toy import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes of whet, except in sandboxes, are forks of one that has imported torch and transformers."""
    from tests.forks import start_child
    from whet.processes import child

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start_child}))


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """Processes that the test starts don't ignore SIGHUP, as all do that nohup has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def loop() -> Iterator[Any]:
    """An event loop in a thread, for vLLM engines that outlive a test."""
    from tests.vllm_engine import Loop

    loop = Loop()
    yield loop
    loop.close()
