import json
import math
import re

import numpy as np
import pytest

from whet.base.errors import DataError
from whet.metrics.sinks.jsonl import FILE, JSONLSink, finished_steps, read_metrics, truncate_after, without_time


def write(folder, steps, resume_step=None):
    sink = JSONLSink().open(folder, {}, resume_step)
    for step in steps:
        sink.write(step, {"loss": step / 10, "time/step": 1.0})
    sink.close()
    return folder / FILE


def test_a_line_is_readable_before_the_sink_is_closed(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, {"loss": 0.5})
    assert without_time(read_metrics(tmp_path / FILE)[0]) == {"step": 1, "kind": "train", "loss": 0.5}
    sink.close()


@pytest.mark.parametrize("edited", [True, False], ids=["replaced", "removed"])
def test_a_file_that_was_replaced_during_the_run_is_followed(edited, tmp_path, caplog):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, {"loss": 0.5})
    if edited:
        (tmp_path / "copy").write_bytes((tmp_path / FILE).read_bytes())
        (tmp_path / "copy").replace(tmp_path / FILE)
    else:
        (tmp_path / FILE).unlink()
    sink.write(2, {"loss": 0.4})
    sink.write(3, {"loss": 0.3})
    sink.close()
    assert [line["step"] for line in read_metrics(tmp_path / FILE)] == ([1, 2, 3] if edited else [2, 3])
    assert caplog.text.count("was removed or replaced during the run") == 1


@pytest.mark.parametrize("made_again", [True, False])
def test_a_file_whose_folder_was_moved_is_written_there(made_again, tmp_path):
    sink = JSONLSink().open(tmp_path / "run", {})
    sink.write(1, {"loss": 0.5})
    (tmp_path / "run").rename(tmp_path / "moved")
    if made_again:
        (tmp_path / "run").mkdir()
    sink.write(2, {"loss": 0.4})
    assert [line["step"] for line in read_metrics(tmp_path / "moved" / FILE)] == [1, 2]
    assert not list((tmp_path / "run").glob("*"))


def test_floats_are_read_back_exactly_numpys_too(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, {"a": 0.1 + 0.2, "b": np.float32(0.1), "c": np.float64(1 / 3), "n": 3, "run/text": "x"})
    sink.close()
    line = read_metrics(tmp_path / FILE)[0]
    assert (line["a"], line["b"], line["c"], line["n"], line["run/text"]) == (
        0.1 + 0.2,
        float(np.float32(0.1)),
        1 / 3,
        3,
        "x",
    )


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, {"loss": math.nan, "kl": math.inf, "entropy": 0.5})
    sink.close()
    text = (tmp_path / FILE).read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is invalid JSON"))
    assert (line["loss"], line["kl"], line["not_finite"]) == (None, None, ["loss", "kl"])


def test_two_runs_differ_in_time_only(tmp_path):
    first, second = (write(tmp_path / name, range(3)) for name in "ab")
    assert [without_time(a) for a in read_metrics(first)] == [without_time(b) for b in read_metrics(second)]
    assert all("time/written" in line for line in read_metrics(first))


def test_resuming_drops_later_steps_and_appends(tmp_path):
    write(tmp_path, range(1, 8))
    path = write(tmp_path, range(6, 9), resume_step=5)
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 9))
    assert path.read_text().count("\n") == 8


def test_resuming_drops_a_line_cut_short_by_a_kill(tmp_path):
    path = write(tmp_path, range(1, 4))
    whole = path.read_bytes()
    for cut in (2, 5, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        assert [line["step"] for line in read_metrics(path)] == [1, 2]
        truncate_after(path, 3)
        assert path.read_bytes() == whole[: whole[:-1].rindex(b"\n") + 1]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = write(tmp_path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    write(tmp_path, range(4, 5), resume_step=3)
    assert path.read_bytes().startswith(whole)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_truncating_does_not_touch_a_file_without_later_steps(tmp_path):
    path = write(tmp_path, range(1, 4))
    before = path.stat().st_ino
    truncate_after(path, 3)
    assert path.stat().st_ino == before
    truncate_after(tmp_path / "missing.jsonl", 3)


def test_an_invalid_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = write(tmp_path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": 2, "los\n' + lines[2])
    with pytest.raises(DataError, match="jsonl:2: "):
        read_metrics(path)
    with pytest.raises(DataError, match="jsonl:2: "):
        truncate_after(path, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('"step": "2"', "step: expected the number of a step, got text '2' in quotes"),
        ('"step": true', "step: expected the number of a step, got true"),
        ('"step": 2, "kind": ["train"]', "kind: expected text, got a list of 1"),
        ('"step": 2, "loss": "low"', "loss: expected a finite number, got text 'low'"),
        ('"step": 2, "time/device_hours": [1]', "time/device_hours: expected a finite number, got a list of 1"),
        ('"step": 2, "evaluation/n": NaN', "evaluation/n: expected a finite number, got the number nan"),
        ('"step": 2, "run/model": {"path": "a"}', "run/model: expected a finite number, got a mapping of 1"),
    ],
)
def test_a_value_of_a_wrong_type_is_an_error_that_names_its_line_and_key(wrong, said, tmp_path):
    path = write(tmp_path, [1])
    path.write_text(f'{path.read_text()}{{{wrong}}}\n{{"step": 3}}\n')
    message = re.escape(f"{path}:2: invalid line ({said})")
    with pytest.raises(DataError, match=message):
        read_metrics(path)
    with pytest.raises(DataError, match=message):
        JSONLSink().open(tmp_path, {}, resume_step=3)
    with path.open("rb") as file, pytest.raises(DataError, match=re.escape(f"{path}: invalid line at byte")):
        list(finished_steps(file))


def test_a_new_run_does_not_append_to_an_old_one(tmp_path):
    write(tmp_path, range(3))
    with pytest.raises(DataError, match="already has"):
        JSONLSink().open(tmp_path, {})


def test_lines_of_one_step_and_kind_are_merged(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(2, {"evaluation/accuracy": 0.5}, "evaluation")
    sink.write(1, {"loss": 1.0})
    sink.write(2, {"evaluation/accuracy": 0.6, "evaluation/n": 10}, "evaluation")
    sink.close()
    first, second = read_metrics(tmp_path / FILE)
    assert (first["step"], second["evaluation/accuracy"], second["evaluation/n"]) == (1, 0.6, 10)


def test_a_metric_cannot_have_a_reserved_name(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    with pytest.raises(ValueError, match="step"):
        sink.write(1, {"step": 5})
    sink.close()


def test_a_missing_file_is_reported_when_the_run_is_resumed(tmp_path, caplog):
    JSONLSink().open(tmp_path, {}, resume_step=4).close()
    assert f"{tmp_path / FILE} is missing: the report will begin at step 5" in caplog.text
    caplog.clear()
    write(tmp_path, [5], resume_step=4)
    caplog.clear()
    JSONLSink().open(tmp_path, {}, resume_step=5).close()
    JSONLSink().open(tmp_path / "began again", {}, resume_step=-1).close()
    assert not caplog.text


def test_a_truncated_file_is_reported_when_the_run_is_resumed(tmp_path, caplog):
    path = write(tmp_path, range(1, 4))
    JSONLSink().open(tmp_path, {}, resume_step=3).close()
    assert not caplog.messages
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    JSONLSink().open(tmp_path, {}, resume_step=3).close()
    path.write_bytes(b"")
    JSONLSink().open(tmp_path, {}, resume_step=3).close()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "it ends at step 1, and the report will continue at step 4",
        "it ends at step 0, and the report will continue at step 4",
    ]
