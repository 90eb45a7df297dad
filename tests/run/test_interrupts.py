"""Interrupts of a cell of a notebook reach the run that the cell waits for."""

import asyncio
import signal
import threading

import pytest

from whet.run.interrupts import without_loop
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
