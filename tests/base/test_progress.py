"""The progress that a process reports."""

import threading

from whet.base.progress import PROGRESS, Progress, about


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_time_left_is_estimated_from_counts() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.begin("evaluating")
    with progress.counting("answers", 200) as answers:
        clock.time = 30.0
        assert progress.text() == "evaluating: 0 of 200 answers, 30 s so far"
        answers.done, clock.time = 50, 60.0
        assert progress.text() == "evaluating: 50 of 200 answers, about 3 min left"
    assert progress.text() == "evaluating: 60 s so far"


def test_nested_counts_divide_the_outer_unit() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.begin("learning")
    outer = progress.each([1, 2], "minibatches")
    next(outer)
    with progress.counting("micro-batches", 4) as inner:
        inner.done, clock.time = 2, 10.0  # a quarter of it all
        assert progress.text() == "learning: 0 of 2 minibatches, 2 of 4 micro-batches, about 30 s left"


def test_an_activity_without_counts_is_estimated_from_its_last_duration() -> None:
    clock = Clock()
    progress = Progress(clock)
    for spent in (60.0, 20.0):
        progress.begin("learning")
        clock.time += spent
        text = progress.text()
        progress.begin("sampling")
    assert text == "learning: about 40 s left"
    progress.begin("learning")
    clock.time += 100
    assert progress.text() == "learning: 2 min so far"


def test_an_activity_within_another_ends_with_its_block_and_is_not_counted_by_the_outer_one() -> None:
    clock = Clock()
    progress = Progress(clock)
    for step in range(2):
        progress.begin("learning")
        clock.time += 10.0
        with progress.within("computing log-probs"):
            clock.time += 30.0
            assert progress.text() == "computing log-probs: 30 s so far"
        assert progress.text() == "learning: " + ("10 s so far", "about 20 s left")[step]
        clock.time += 20.0
        progress.begin("sampling")


def test_a_measured_count_is_read_when_it_is_shown_and_ends_with_the_activity() -> None:
    progress = Progress(lambda: 0.0)
    done = [1]
    progress.begin("sampling")
    progress.count("answers", 8, lambda: done[0])
    done[0] = 100
    assert progress.text().startswith("sampling: 8 of 8 answers")
    progress.begin("learning")
    assert "answers" not in progress.text()


def test_another_thread_may_count() -> None:
    progress = Progress(lambda: 0.0)

    def work() -> None:
        for _ in progress.each(range(100), "tensors"):
            progress.text()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert progress.text() == ": 1 s so far"


def test_times_are_rough() -> None:
    assert [about(seconds) for seconds in (0, 9.4, 84, 100, 3600, 20_000)] == [
        "1 s", "9 s", "80 s", "2 min", "60 min", "5 h 33 min",
    ]  # fmt: skip


def test_a_process_has_one_progress() -> None:
    PROGRESS.begin("a test")
    assert PROGRESS.text().startswith("a test: ")
