"""Jobs in order, turns in between, and threads that can be abandoned."""

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from whet.processes.threads import JobThread, outcome_of, run_in_thread


@pytest.fixture
def thread() -> JobThread:
    return JobThread("test")


def test_jobs_run_in_order_on_one_thread_that_is_a_daemon(thread: JobThread) -> None:
    def job(number: int) -> tuple[int, threading.Thread]:
        return number, threading.current_thread()

    done = [one.result(60) for one in [thread.submit(job, number) for number in range(5)]]
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert len({one for _, one in done}) == 1
    assert done[0][1].daemon


def test_what_a_job_raises_its_future_raises(thread: JobThread) -> None:
    failing = thread.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert thread.submit(int, "7").result(60) == 7


def test_an_iterator_that_is_used_up_is_an_error_and_no_wait_without_end(thread: JobThread) -> None:
    def first() -> int:
        return next(iter(list[int]()))

    async def both() -> None:
        for answer in (run_in_thread(first, "first"), outcome_of(thread.submit(first))):
            with pytest.raises(RuntimeError, match=r"StopIteration: next\(\) found no further item") as error:
                await asyncio.wait_for(answer, 20)
            assert isinstance(error.value.__cause__, StopIteration)

    asyncio.run(both())


def test_a_job_that_is_cancelled_before_it_began_never_runs(thread: JobThread) -> None:
    release, ran = threading.Event(), list[int]()
    thread.submit(release.wait, 60)
    waiting = thread.submit(ran.append, 1)
    assert waiting.cancel()
    release.set()
    thread.submit(int).result(60)
    assert ran == []


def test_jobs_and_turns_alternate_while_both_wait(thread: JobThread) -> None:
    release, order = threading.Event(), list[str]()
    thread.submit(release.wait, 60)
    for number in range(3):
        last = thread.submit(order.append, f"job {number}")
        thread.submit(order.append, f"turn {number}", turn=True)
    release.set()
    last.result(60)
    assert order == ["turn 0", "job 0", "turn 1", "job 1", "turn 2", "job 2"]


def test_a_long_job_lets_turns_in_for_as_long_as_its_last_part_took(
    thread: JobThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, order = [0.0], list[str]()
    monkeypatch.setattr("whet.processes.threads.time.monotonic", lambda: now[0])

    def spend(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    def step(left: int) -> None:
        spend("step", 1.0)
        if left:
            thread.submit(step, left - 1, turn=True)

    def update() -> None:
        for seconds in (2.0, 3.0):
            spend("part", seconds)
            thread.yield_to_decoder()
        order.append("end")

    release = threading.Event()
    thread.submit(release.wait, 60)
    thread.submit(order.clear, turn=True)
    updating = thread.submit(update)
    thread.submit(step, 9, turn=True)
    release.set()
    updating.result(60)
    assert order[: order.index("end")] == ["part", "step", "step", "part", "step", "step", "step"]


def test_letting_turns_in_does_nothing_elsewhere(thread: JobThread) -> None:
    release, ran = threading.Event(), list[int]()
    thread.submit(release.wait, 60)
    turn = thread.submit(ran.append, 1, turn=True)
    thread.yield_to_decoder()
    assert ran == []
    release.set()
    turn.result(60)


def test_a_job_that_hangs_is_abandoned_and_others_continue(thread: JobThread) -> None:
    release = threading.Event()
    _, hanging, others = hang(thread, release)
    thread.give_up([hanging])
    assert others.result(60) == 3
    assert thread.doing is None
    release.set()
    assert hanging.result(60) == 1
    assert thread.submit(int, "4").result(60) == 4


def test_giving_up_what_waits_leaves_the_running_job_alone(thread: JobThread) -> None:
    release = threading.Event()
    _, hanging, waiting = hang(thread, release)
    thread.give_up([waiting])
    assert waiting.cancelled()
    release.set()
    assert hanging.result(60) == 1


def test_an_ended_thread_cancels_waiting_jobs_and_can_start_again(thread: JobThread) -> None:
    release = threading.Event()
    began, hanging, waiting = hang(thread, release)
    thread.end()
    with pytest.raises(CancelledError):
        waiting.result(60)
    release.set()
    assert hanging.result(60) == 1
    assert thread.submit(threading.current_thread).result(60) is not began
    began.join(60)
    assert not began.is_alive()


def hang(thread: JobThread, release: threading.Event) -> tuple[threading.Thread, Future[int], Future[int]]:
    """Return the thread, a job that runs until ``release``, and a job that waits behind it and returns 3."""
    began = thread.submit(threading.current_thread).result(60)

    entered = threading.Event()

    def hanging() -> int:
        entered.set()
        release.wait(240)
        return 1

    running = thread.submit(hanging)
    assert entered.wait(60)
    return began, running, thread.submit(int, "3")
