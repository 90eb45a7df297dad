"""The timeline of a run as a file that Perfetto opens."""

import gzip
import json

import pytest

from whet.base.errors import DataError, WhetError
from whet.metrics.clock import FILE as EPISODES
from whet.metrics.clock import Played, read_played, write_played
from whet.metrics.sinks.jsonl import FILE, JSONLSink
from whet.show.trace import write_trace


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    sink = JSONLSink().open(folder, {})
    sink.write(0, {"evaluation/accuracy": 0.25, "evaluation/n": 4}, "evaluation")
    for step in (1, 2):
        sink.write(step, {"reward/mean": 0.5, "loss": float("nan"), "time/step": 3.0, "time/learn": 2.0})
        sink.write(step, {"evaluation/accuracy": 0.5}, "evaluation")
        sink.write(step, {"time/step": 4.0, "time/learn": 2.0, "time/generate": 1.5, "time/checkpoint": 0.5})
        write_played(folder, step, [Played(f"{step}/a", 0, 100.0, 2.0, "completed", 7), Played(f"{step}/b", 1, 101.0)])
    sink.close()
    return folder


def events(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_steps_phases_episodes_and_curves_are_in_the_file(run, tmp_path, name):
    assert write_trace(run, tmp_path / name) == (2, 4)
    found = events(tmp_path / name)
    steps = [event for event in found if event.get("cat") == "step"]
    assert [(event["name"], event["dur"]) for event in steps] == [("step 1", 4_000_000), ("step 2", 4_000_000)]
    phases = [event for event in found if event.get("cat") == "phase"][:3]
    assert {event["name"]: event["dur"] for event in phases} == {
        "generate": 1_500_000,
        "learn": 2_000_000,
        "checkpoint": 500_000,
    }
    assert phases[0]["ts"] == steps[0]["ts"]
    episode = next(event for event in found if event["name"] == "1/a")
    assert (episode["tid"], episode["ts"], episode["dur"]) == (0, 100_000_000, 2_000_000)
    assert episode["args"] == {"step": 1, "status": "completed", "tokens": 7}
    curves = [event["name"] for event in found if event["ph"] == "C"]
    assert curves == ["evaluation/accuracy", "reward/mean", "evaluation/accuracy", "reward/mean", "evaluation/accuracy"]


def test_lines_that_a_kill_tore_or_that_have_wrong_types_are_left_out(run, tmp_path):
    with (run / EPISODES).open("a") as file:
        file.write('{"step": 3, "na\n{"step": 3}\n{"step": 3, "name": "3/a", "lane": 0, "began": "noon"}\n')
    with (run / FILE).open("a") as file:
        file.write('{"step": 3, "loss"')
    assert len(list(read_played(run))) == 4
    assert write_trace(run, tmp_path / "t.json") == (2, 4)


def test_a_run_of_rows_has_steps_alone(run, tmp_path):
    (run / EPISODES).unlink()
    assert write_trace(run, tmp_path / "t.json") == (2, 0)


def test_what_can_not_be_written_is_named_and_nothing_is_left(run, tmp_path):
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(DataError, match=r"there\.json exists"):
        write_trace(run, tmp_path / "there.json")
    assert (tmp_path / "there.json").read_text() == "mine"
    with pytest.raises(WhetError, match="can't be written"):
        write_trace(run, tmp_path / "none" / "t.json")
    with pytest.raises(DataError, match="no step of this run has ended yet"):
        write_trace(tmp_path, tmp_path / "t.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there.json"]
