"""Interrupts of a cell of a notebook reach the run that the cell waits for."""

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from whet.run.interrupts import wait_for, without_loop
from whet.run.signals import StopRequest


def test_an_interrupt_while_the_thread_of_a_run_starts_reaches_the_run_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, asked = threading.Thread.start, list[bool]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    def work(stop: StopRequest) -> None:
        asked.append(stop.at_once)
        while not stop.at_once:
            pass
        raise asyncio.CancelledError

    async def cell() -> None:
        without_loop(work)

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert len(asked) == 1
    for thread in threading.enumerate():
        if thread.name.startswith("whet-run"):
            thread.join(30)
            assert not thread.is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_another_thread_receives_ends_the_wait_for_a_run() -> None:
    def work(stop: StopRequest) -> None:
        time.sleep(0.3)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # does not wake the main thread
        until = time.monotonic() + 60
        while not stop.at_once and time.monotonic() < until:
            time.sleep(0.01)
        assert stop.at_once
        raise asyncio.CancelledError

    async def cell() -> None:
        without_loop(work)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()


def test_an_interrupt_reaches_a_run_that_a_task_of_asyncio_run_waits_for() -> None:
    def work(stop: StopRequest) -> str:
        stop.begun = True
        signal.raise_signal(signal.SIGINT)
        until = time.monotonic() + 60
        while stop.by is None and time.monotonic() < until:
            time.sleep(0.01)
        return f"ended by {stop.by}"

    async def main() -> str:
        handler = signal.getsignal(signal.SIGINT)
        result = without_loop(work)
        assert signal.getsignal(signal.SIGINT) == handler
        return result

    assert asyncio.run(main()) == f"ended by {signal.SIGINT!s}"


@pytest.mark.parametrize("when", ["it is submitted", "it runs"])
def test_an_interrupt_ends_the_wait_for_a_coroutine(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ended = asyncio.new_event_loop(), list[str]()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    submit = loop.call_soon_threadsafe

    def submit_interrupted(*arguments: Any, **context: Any) -> asyncio.Handle:
        monkeypatch.undo()
        handle = submit(*arguments, **context)
        signal.raise_signal(signal.SIGINT)
        return handle

    if when == "it is submitted":
        monkeypatch.setattr(loop, "call_soon_threadsafe", submit_interrupted)

    async def work() -> None:
        if when == "it runs":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # another thread than the one that waits
        try:
            await asyncio.sleep(60)
            ended.append("by itself")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        wait_for(work(), loop)
    assert ended == ["cancelled"]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_an_exception_of_the_work_is_raised_without_another_in_front() -> None:
    def work(stop: StopRequest) -> None:
        raise KeyError("row")

    with pytest.raises(KeyError) as caught:
        without_loop(work)
    assert caught.value.__context__ is None
