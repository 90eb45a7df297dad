"""The report of a run in progress, of an interrupted run and of a failed run."""

import logging
import signal
import time
from pathlib import Path

import pytest

import whet
from tests.forks import whet_fork
from tests.show.runs import train_values
from tests.toy import Flaky, toy_recipe, write_recipe
from whet.base.errors import WhetError
from whet.metrics.sinks.jsonl import JSONLSink
from whet.show.report import LiveReport


def test_it_is_written_again_where_there_are_new_metrics(tmp_path: Path) -> None:
    report, live = tmp_path / "report.html", LiveReport(tmp_path)
    live.refresh()
    assert not report.exists()  # there is nothing to report
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, train_values(1))
    live.refresh()
    first = report.read_text()
    report.unlink()
    live.refresh()
    assert not report.exists()
    sink.write(2, train_values(2))
    live.refresh()
    assert report.read_text() != first


def test_a_thread_does_so_meanwhile_and_the_end_does_too(tmp_path: Path) -> None:
    sink, report = JSONLSink().open(tmp_path, {}), tmp_path / "report.html"
    ends = time.monotonic() + 120
    with LiveReport(tmp_path, every=0.01):
        sink.write(1, train_values(1))
        while not report.exists() and time.monotonic() < ends:
            time.sleep(0.02)
    with LiveReport(tmp_path, every=3600):
        report.unlink()
        sink.write(2, train_values(2))
    assert report.exists()


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    with caplog.at_level(logging.WARNING), LiveReport(tmp_path):
        pass
    assert "report.html is not up to date" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_run_that_fails_has_one(tiny_model: Path, tmp_path: Path) -> None:
    always = {f"toy/train/{task}": 1000 for task in range(12)}
    recipe = toy_recipe(tiny_model, steps=3, rollouts={"retries": 0}, evaluation={"enabled": False})
    with pytest.raises(WhetError, match="the grader is away"):
        whet.start(
            write_recipe(tmp_path / "toy.yaml", recipe), folder=tmp_path / "run", data=Flaky(failures=always, met={})
        )
    assert "step" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_is_interrupted_has_one_and_names_it(tiny_model: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=100_000, sinks=["console", "jsonl"]))
    with whet_fork("train", "toy.yaml", "--folder", "run", folder=tmp_path) as process:
        while "step 1/100000  " not in (line := process.stdout.readline()):
            assert line, process.communicate(60)[1]
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert error.endswith("interrupted. Resume with: whet resume run\nReport so far: run/report.html\n")
    assert (tmp_path / "run" / "report.html").exists()
