import json

import numpy as np

from whet.metrics.sinks.jsonl import JSONLSink
from whet.show.charts import MOST, charts, reduced
from whet.show.history import History


def history_of(folder, *lines):
    folder.mkdir(exist_ok=True)
    sink = JSONLSink().open(folder, {})
    for step, values, kind in lines:
        sink.write(step, values, kind)
    sink.close()
    history = History(folder)
    history.read()
    return history


def test_few_points_are_unchanged_and_many_keep_mean_lowest_and_highest():
    x, y = np.arange(10), np.arange(10.0)
    assert [part.tolist() for part in reduced(x, y, 10)] == [x.tolist(), *[y.tolist()] * 3]
    middle, mean, low, high = reduced(x, y, 4)
    assert (middle.tolist(), mean.tolist()) == ([1, 4, 7, 9], [1.0, 4.0, 7.0, 9.0])
    assert (low.tolist(), high.tolist()) == ([0.0, 3.0, 6.0, 9.0], [2.0, 5.0, 8.0, 9.0])
    assert reduced(x[:0], y[:0], 4)[0].tolist() == []


def test_a_long_run_costs_as_much_as_a_short_one_and_a_zoom_shows_its_steps(tmp_path):
    times = {"time/step": 1.0, "time/learn": 0.5}
    lines = (json.dumps({"step": s, "reward/mean": s % 7, **times}) + "\n" for s in range(1, 20_001))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    history = History(tmp_path)
    history.read()
    whole = charts(history)
    line = whole["learning"][0]["lines"][0]
    assert len(line["x"]) == len(line["y"]) == len(line["low"]) == MOST
    assert (set(line["low"]), set(line["high"])) == ({0.0}, {6.0})
    assert len(whole["phases"]["x"]) <= 120
    assert whole["phases"]["sums"] == {"learn": 10_000.0, "other": 10_000.0}
    zoomed = charts(history, (100, 119))["learning"][0]["lines"][0]
    assert zoomed["x"] == list(range(100, 120))
    assert "low" not in zoomed


def test_a_range_without_steps_has_no_charts(run_folder):
    history = History(run_folder)
    history.read()
    assert charts(history, (100, 200))["learning"] == []
    assert charts(history, (100, 200))["phases"]["x"] == []


def test_held_out_results_share_the_chart_with_their_interval(tmp_path):
    held_out = [(s, {"evaluation/accuracy": 0.1 * s, "evaluation/n": 100}, "evaluation") for s in (0, 2)]
    chart = charts(history_of(tmp_path / "run", *held_out, (1, {"accuracy": 0.5}, "train")))["learning"][0]
    training, evaluation = chart["lines"]
    assert (training["x"], evaluation["x"], evaluation["interval"]) == ([1], [0, 2], True)
    assert evaluation["low"][1] < 0.2 < evaluation["high"][1]


def test_numbers_that_are_not_finite_are_marked(tmp_path):
    history = history_of(tmp_path / "run", (1, {"loss": 1.0}, "train"), (2, {"loss": float("inf")}, "train"))
    chart = charts(history)["learning"][0]
    assert (chart["lines"][0]["x"], chart["lines"][0]["broken"], chart["last"], chart["hot"]) == (
        [1],
        [2],
        "nan/inf",
        True,
    )


def test_sets_have_a_chart_each(tmp_path):
    held_out = {"evaluation/accuracy": 0.5, "evaluation/sums/accuracy": 0.4, "evaluation/sums/n": 10}
    lines = (1, {"env/sums/pass_rate": 0.3}, "train"), (1, held_out, "evaluation")
    chart = charts(history_of(tmp_path / "run", *lines))["sets"][0]
    assert (chart["label"], [line["y"] for line in chart["lines"]]) == ("sums", [[0.3], [0.4]])
