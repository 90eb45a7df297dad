import asyncio

import pytest

from whet.metrics.clock import Clock, Pace, Timing


class Time:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_inner_phase_pauses_the_outer_one_and_their_times_sum_to_the_step():
    time = Time()
    clock = Clock(time)
    with clock.phase("generate"):
        time.now += 2
        with clock.phase("grade"):
            time.now += 3
        time.now += 1
    time.now += 0.5
    assert clock.lap() == {"time/generate": 3, "time/grade": 3, "time/other": 0.5, "time/step": 6.5}


def test_a_lap_splits_an_open_phase_between_two_steps():
    time = Time()
    clock = Clock(time)
    with clock.phase("learn"):
        time.now += 2
        assert clock.lap()["time/learn"] == 2
        time.now += 1
    assert clock.lap() == {"time/learn": 1, "time/other": 0, "time/step": 1}


def test_a_phase_entered_twice_counts_both_and_the_next_step_starts_at_zero():
    time = Time()
    clock = Clock(time)
    for _ in range(2):
        with clock.phase("learn"):
            time.now += 1
    assert clock.lap()["time/learn"] == 2
    assert clock.lap() == {"time/other": 0, "time/step": 0}


def test_a_phase_that_fails_is_still_counted_and_closed():
    time = Time()
    clock = Clock(time)

    def fail():
        with clock.phase("learn"):
            time.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    time.now += 1
    assert clock.lap() == {"time/learn": 1, "time/other": 1, "time/step": 2}


def test_phases_of_other_tasks_are_separate_and_count_while_at_least_one_is_open():
    time = Time()

    async def main() -> dict[str, float]:
        clock = Clock(time)
        clock.start()
        first_open, second_open, close_first, close_second = (asyncio.Event() for _ in range(4))

        async def rollout(opened: asyncio.Event, close: asyncio.Event) -> None:
            with clock.phase("generate"):
                opened.set()
                await close.wait()

        first = asyncio.create_task(rollout(first_open, close_first))
        await first_open.wait()
        with clock.phase("learn"):
            time.now += 1
            second = asyncio.create_task(rollout(second_open, close_second))
            await second_open.wait()
            time.now += 1
            close_first.set()
            await first
            time.now += 1
            close_second.set()
            await second
            time.now += 1
        return clock.lap()

    assert asyncio.run(main()) == {"time/learn": 4, "time/other": 0, "time/step": 4, "time/overlap/generate": 3}


def test_a_background_phase_may_outlive_a_step():
    time = Time()

    async def main() -> list[float]:
        clock = Clock(time)
        clock.start()
        opened, close = asyncio.Event(), asyncio.Event()

        async def rollout() -> None:
            with clock.phase("generate"):
                opened.set()
                await close.wait()

        task = asyncio.create_task(rollout())
        await opened.wait()
        time.now += 2
        laps = [clock.lap()["time/overlap/generate"]]
        time.now += 3
        close.set()
        await task
        return [*laps, clock.lap()["time/overlap/generate"]]

    assert asyncio.run(main()) == [2, 3]


def test_reserved_names_are_refused_as_phases():
    with pytest.raises(ValueError, match="step"), Clock().phase("step"):
        pass


def test_one_slow_step_changes_neither_throughput_nor_time_left():
    pace = Pace()
    assert pace.eta(10) is None
    assert pace.tokens_per_second() == 0
    for _ in range(4):
        pace.add(2.0, 1000)
    pace.add(600.0, 1000)
    assert pace.tokens_per_second() == 500
    assert pace.eta(10) == 20
    assert pace.eta(-1) == 0


def test_episodes_that_overlap_have_different_lanes_and_a_free_lane_is_taken_again():
    timing = Timing()
    with timing.episode("a") as a:
        with timing.episode("b") as b:
            assert (a.lane, b.lane) == (0, 1)
        with timing.episode("c") as c:
            assert c.lane == 1
            c.status, c.tokens = "completed", 3
    played = timing.lap().played
    assert [(one.name, one.status) for one in played] == [("b", "cancelled"), ("c", "completed"), ("a", "cancelled")]
    assert played[2].seconds >= played[1].seconds >= 0
    assert timing.played == []
