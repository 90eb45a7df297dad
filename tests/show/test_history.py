import json
import math

import numpy as np

from whet.metrics.sinks.jsonl import JSONLSink
from whet.show.history import History


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def history_of(folder):
    history = History(folder)
    history.read()
    return history


def test_what_was_added_is_read_and_a_line_that_is_being_written_is_not(tmp_path):
    history = History(tmp_path)
    assert not history.refresh(), "a run that has not begun has no file"
    append(tmp_path, {"step": 1, "loss": 3.0}, '{"step": 2, "lo')
    assert history.refresh()
    assert history.train.steps.tolist() == [1]
    assert not history.refresh()
    append(tmp_path, 'ss": 2.0}\n')
    assert history.refresh()
    assert history.train.column("loss").tolist() == [3.0, 2.0]
    assert history.damaged_lines == 0


def test_missing_and_infinite_numbers_differ(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    for step, values in enumerate(({"loss": 1.0}, {"kl": 2.0}, {"loss": math.nan, "kl": 1}, {"loss": 4.0})):
        sink.write(step, values)
    sink.close()
    table = history_of(tmp_path).train
    loss, kl = table.column("loss"), table.column("kl")
    assert np.isnan(loss).tolist() == [False, True, False, False]
    assert loss[2] == math.inf
    assert np.isnan(kl).tolist() == [True, False, False, True]
    assert np.isnan(table.column("other")).all()


def test_later_values_of_a_step_replace_earlier_ones_and_steps_are_in_order(tmp_path):
    append(tmp_path, {"step": 2, "a": 1.0, "b": 1.0}, {"step": 4, "a": 2.0}, {"step": 2, "a": 5.0}, {"step": 3, "b": 7})
    table = history_of(tmp_path).train
    assert table.steps.tolist() == [2, 3, 4]
    assert table.column("a")[[0, 2]].tolist() == [5.0, 2.0]
    assert table.column("b")[:2].tolist() == [1.0, 7.0]
    assert np.isnan(table.column("a")[1])


def test_a_resumed_run_that_cuts_its_file_is_read_from_the_beginning(tmp_path):
    append(tmp_path, *({"step": step, "loss": 1.0} for step in range(1, 9)))
    history = history_of(tmp_path)
    JSONLSink().open(tmp_path, {}, resume_step=5).close()
    history.read()
    assert history.train.steps.tolist() == [1, 2, 3, 4, 5]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    history.read()
    assert history.train.column("loss").tolist() == [2.0]


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    damaged = ["[]\n", "\x00\x00\n", '{"step": "x"}\n', '{"loss": 1}\n', '{"step": true}\n', "\n"]
    append(
        tmp_path, {"step": 1, "loss": 1.0}, *damaged, {"step": 2, "loss": 10**400, "kl": 1}, {"step": 3, "loss": 3.0}
    )
    history = history_of(tmp_path)
    assert history.train.steps.tolist()[-1] == 3
    assert history.damaged_lines == 6
    assert history.notices() == ["6 damaged lines of metrics.jsonl were left out: 2, 3, 4, 5, 6 ..."]


def test_evaluations_and_facts_are_kept_apart(tmp_path):
    append(tmp_path, {"step": 0, "run/device": "cpu"}, {"step": 0, "kind": "evaluation", "evaluation/accuracy": 0.5})
    append(tmp_path, {"step": 0, "kind": "evaluation", "evaluation/n": 8}, {"step": 1, "loss": 1.0, "text": "x"})
    history = history_of(tmp_path)
    assert history.reported == {"run/device": "cpu"}
    assert [(line["evaluation/accuracy"], line["evaluation/n"]) for line in history.evaluations] == [(0.5, 8)]
    assert history.train.names == ["loss"]


def test_an_evaluation_keeps_finite_numbers_only(tmp_path):
    line = {"step": 1, "kind": "evaluation", "evaluation/accuracy": "x", "evaluation/loss": None, "evaluation/n": 8}
    append(tmp_path, line, '{"step": 2, "kind": "evaluation", "evaluation/loss": NaN}\n')
    kept = [{"step": 1, "evaluation/n": 8, "kind": "evaluation"}, {"step": 2, "kind": "evaluation"}]
    assert history_of(tmp_path).evaluations == kept


def test_a_file_larger_than_a_chunk_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("whet.show.history._CHUNK", 100)
    append(tmp_path, *({"step": step, "loss": float(step)} for step in range(50)), "x" * 250 + "\n", {"step": 50})
    history = History(tmp_path)
    assert history.refresh()
    assert 0 < history.share < 1
    history.read()
    assert history.share == 1
    assert history.train.steps.tolist() == list(range(51))
    assert history.damaged_lines == 3, "the two parts of the long line that fill a chunk, and its end"
