"""A run whose checkpoints are gone is not begun again in its folder, which would drop its metrics."""

from pathlib import Path

import pytest

from whet.base.errors import ConfigError
from whet.run.folder import check_resumable

SAVED = '{"step": 1, "reward/mean": 0.5}\n{"step": 1, "time/step": 2.0, "time/checkpoint": 0.5}\n'


@pytest.mark.parametrize("in_the_way", [False, True], ids=["deleted", "a file"])
def test_a_run_whose_checkpoints_are_gone_is_refused(in_the_way: bool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(SAVED)
    if in_the_way:
        (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match=r"Put the folder back, or begin again elsewhere: whet train .*recipe\.yaml"):
        check_resumable(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == SAVED


@pytest.mark.parametrize("metrics", [SAVED.replace("checkpoint", "other"), None], ids=["not saved yet", "no step yet"])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(metrics: str | None, tmp_path: Path) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    check_resumable(tmp_path)


def test_a_run_that_was_killed_while_its_first_checkpoint_was_written_begins_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(SAVED)
    (tmp_path / "checkpoints").mkdir()
    check_resumable(tmp_path)
