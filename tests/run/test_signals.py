"""When a Slurm job ends, as Slurm says it. What a run does then is in ``tests/e2e/test_stop_signals.py``."""

from datetime import datetime
from pathlib import Path

import pytest

from whet.checkpoint.config import CheckpointConfig
from whet.run.signals import end_of_job


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A fake of ``scontrol``, first in the path."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (folder / "scontrol").write_text(f'#!/bin/sh\n[ "$*" = "show job -o 4711" ] && echo "{answer}"\n')
    (folder / "scontrol").chmod(0o700)


def test_the_environment_says_it_or_else_slurm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(tmp_path, monkeypatch, "JobId=4711 JobName=a=b StartTime=2026-01-02T03:00:00 EndTime=2026-01-02T05:00:00 X=")
    assert end_of_job() == datetime(2026, 1, 2, 5).timestamp()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1767322800")
    assert end_of_job() == 1767322800.0


@pytest.mark.parametrize("answer", ["JobId=4711 EndTime=Unknown", "", "slurm_load_jobs error"])
def test_a_job_without_an_end_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    slurm(tmp_path, monkeypatch, answer)
    assert end_of_job() is None
    (tmp_path / "scontrol").unlink()
    assert end_of_job() is None
    monkeypatch.delenv("SLURM_JOB_ID")
    assert end_of_job() is None


def test_a_time_is_said_in_seconds_or_with_its_unit() -> None:
    said = {"90": 90.0, "90s": 90.0, "10m": 600.0, "1.5h": 5400.0}
    assert {text: CheckpointConfig(before=text).before for text in said if not text.isdecimal()} == {
        text: seconds for text, seconds in said.items() if not text.isdecimal()
    }
    assert CheckpointConfig(before=90).before == 90.0
    with pytest.raises(ValueError, match="before"):
        CheckpointConfig(before="10 minutes")
