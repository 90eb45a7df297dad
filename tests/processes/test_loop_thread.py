"""Code on a separate thread can't block its caller or the process."""

import asyncio
import gc
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from whet.base.closing import abandoned_threads
from whet.base.errors import CallError, WhetError
from whet.processes import loop_thread
from whet.processes.loop_thread import LoopThread, UserCodeExit, format_error
from whet.processes.threads import run_in_thread
from whet.processes.user_code import user_frames, user_lines
from whet.tasks.judges.judge import JudgeError


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    abandoned_threads.clear()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that ends is waited for however busy the machine is."""
    monkeypatch.setattr(loop_thread, "_CLOSING", 60.0)


def with_thread(work: Callable[[LoopThread], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        thread = LoopThread("user")
        try:
            return await work(thread)
        finally:
            await thread.close()

    return asyncio.run(go())


async def give(value: Any) -> Any:
    await asyncio.sleep(0)
    return value, threading.current_thread().name


async def raise_(error: BaseException) -> None:
    raise error


async def block(began: threading.Event, gate: threading.Event) -> None:
    began.set()
    gate.wait(240)


async def give_up(call: Awaitable[Any], began: threading.Event) -> None:
    """Wait a moment for a call that has begun, and give it up."""
    task = asyncio.ensure_future(call)
    assert await asyncio.to_thread(began.wait, 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.1)


@pytest.mark.usefixtures("patient")
def test_calls_run_concurrently_on_the_thread_and_return_here() -> None:
    async def work(thread: LoopThread) -> Any:
        return await asyncio.gather(*(thread.run(give, i) for i in range(3)))

    assert with_thread(work) == [(i, "user") for i in range(3)]
    assert not abandoned_threads


def test_errors_are_raised_unchanged_and_exits_as_user_code_exit() -> None:
    async def work(thread: LoopThread) -> None:
        with pytest.raises(KeyError, match="x"):
            await thread.run(raise_, KeyError("x"))
        for error in (SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()):
            with pytest.raises(UserCodeExit, match=rf"{type(error).__name__}.* at .*{__name__.split('.')[-1]}\.py:\d+"):
                await thread.run(raise_, error)

    with_thread(work)


def stop() -> None:
    next(iter([]))


async def wait() -> None:
    await asyncio.wait_for(asyncio.Event().wait(), 0.0)


@pytest.mark.parametrize(
    ("call", "kind", "function"), [(stop, RuntimeError, "stop"), (wait, TimeoutError, "wait")], ids=["stop", "wait"]
)
def test_errors_that_python_replaces_keep_the_line_of_the_user(
    call: Callable[[], Any], kind: type[Exception], function: str
) -> None:
    async def work(thread: LoopThread) -> None:
        with pytest.raises(kind) as caught:
            await thread.run(call)
        assert user_frames(caught.value)[-1].name == function
        assert f" at {__file__}:" in format_error(caught.value)

    with_thread(work)


def test_a_timeout_in_a_thread_of_its_own_keeps_its_line() -> None:
    def slow() -> None:
        raise TimeoutError("timed out")

    async def work() -> None:
        with pytest.raises(TimeoutError) as caught:
            await run_in_thread(slow, "own")
        assert user_frames(caught.value)[-1].name == "slow"

    asyncio.run(work())


def test_the_text_of_an_exception_is_cut_where_it_is_very_long() -> None:
    error = ValueError("a" * 10_000_000 + "the end")
    for text in (format_error(error), user_lines(error)):
        assert len(text) < 5_000
        assert "[9,99" in text
        assert "characters left out" in text
        assert "the end" in text


def test_a_caller_that_gives_up_does_not_wait_for_blocking_code_whose_line_is_known() -> None:
    began, gate = threading.Event(), threading.Event()

    async def work(thread: LoopThread) -> None:
        assert thread.blocked_at() is None
        await give_up(thread.run(block, began, gate), began)
        assert not gate.is_set()
        assert re.search(rf"{__file__}:\d+ in block$", thread.blocked_at() or "")

    with_thread(work)
    gate.set()
    assert abandoned_threads == ["user"]


@pytest.mark.usefixtures("patient")
def test_code_that_is_given_up_is_cancelled() -> None:
    began, noticed = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            noticed.set()

    async def work(thread: LoopThread) -> None:
        await give_up(thread.run(wait), began)
        assert await asyncio.to_thread(noticed.wait, 60)

    with_thread(work)
    assert not abandoned_threads


@pytest.mark.usefixtures("patient")
def test_the_end_of_running_code_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def work(thread: LoopThread) -> None:
        await thread.run(start_in_background)

    async def start_in_background() -> None:
        running.append(asyncio.create_task(asyncio.sleep(3600.0)))

    running = list["asyncio.Task[None]"]()
    gc.collect()  # what other tests left behind

    with caplog.at_level("INFO"):
        with_thread(work)
        gc.collect()
    assert not caplog.records


def test_a_helper_thread_that_hangs_is_abandoned() -> None:
    began, gate = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        gate.wait(240)

    async def work(thread: LoopThread) -> None:
        await give_up(thread.run(asyncio.to_thread, hang), began)

    with_thread(work)
    gate.set()
    assert abandoned_threads
    assert all(name.startswith("user-helper") for name in abandoned_threads)


@pytest.mark.usefixtures("patient")
def test_a_closed_thread_refuses_calls_and_closing_an_idle_one_leaves_nothing() -> None:
    async def go() -> None:
        thread = LoopThread("user")
        await thread.close()
        with pytest.raises(WhetError, match="user is closed"):
            await thread.run(give, 1)

    asyncio.run(go())
    assert not abandoned_threads


def test_an_error_of_whet_is_its_text_alone_and_another_one_has_its_place() -> None:
    def fail(error: Exception) -> str:
        try:
            raise error
        except Exception as caught:
            return format_error(caught)

    assert fail(JudgeError("the judge gave no verdict")) == "the judge gave no verdict"
    assert fail(CallError("the program took too long")) == "the program took too long"
    assert fail(ValueError("no")).startswith(f"ValueError('no') at {__file__}:")


def test_an_error_without_a_text_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __repr__(self) -> str:
            raise SystemExit

    assert format_error(Mute()) == "Mute (its text can't be formatted)"
