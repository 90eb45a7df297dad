"""Interrupts cancel the coroutine; only a blocked loop, or the end of the process, has them raised."""

import asyncio
import os
import signal
import time

import pytest

from whet.processes import interrupts
from whet.processes.interrupts import interruptible


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_cancels_and_later_ones_cancel_what_closes() -> None:
    ends = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, press)
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("work")
            asyncio.get_running_loop().call_later(0.01, press)
            try:
                await asyncio.sleep(60)
            finally:
                ends.append("closing")

    with pytest.raises(KeyboardInterrupt), interruptible() as handler:
        asyncio.run(handler.watch(main()))
    assert ends == ["work", "closing"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_burst_is_not_raised_while_the_loop_has_no_time_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 60.0)
    closed = []

    async def main() -> None:
        for _ in range(5):
            press()
        closed.append("not interrupted here")
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt), interruptible() as handler:
        asyncio.run(handler.watch(main()))
    assert closed == ["not interrupted here"]


def test_an_interrupt_of_a_blocked_loop_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)

    async def main() -> None:
        press()
        time.sleep(0.1)
        press()
        raise AssertionError("the second interrupt was not raised")

    with pytest.raises(KeyboardInterrupt), interruptible() as handler:
        asyncio.run(handler.watch(main()))


def test_cancellation_by_the_program_stays_a_cancellation() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)  # type: ignore[union-attr]
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError), interruptible() as handler:
        asyncio.run(handler.watch(main()))


def test_a_handler_of_somebody_else_stays() -> None:
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        with interruptible():
            press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]
