"""A run whose checkpoints are gone is not begun again in its folder, which would drop its metrics."""

import fcntl
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from whet.base.errors import ConfigError, WhetError
from whet.checkpoint.lock import run_lock
from whet.run.folder import Place, check_resumable
from whet.run.log import logging_to

SAVED = '{"step": 1, "reward/mean": 0.5}\n{"step": 1, "time/step": 2.0, "time/checkpoint": 0.5}\n'


@pytest.mark.parametrize("left", [None, "a file", "an empty folder"])
def test_a_run_whose_checkpoints_are_gone_is_refused(left: str | None, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(SAVED)
    if left == "a file":
        (tmp_path / "checkpoints").write_text("")
    elif left:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"Put them back, or begin again elsewhere: whet train .*recipe\.yaml"):
        check_resumable(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == SAVED


@pytest.mark.parametrize("metrics", [SAVED.replace("checkpoint", "other"), None], ids=["not saved yet", "no step yet"])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(metrics: str | None, tmp_path: Path) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    check_resumable(tmp_path)


def test_a_run_that_was_killed_while_its_first_checkpoint_was_written_begins_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(SAVED)
    (tmp_path / "checkpoints/.staging-step-000001-7").mkdir(parents=True)
    check_resumable(tmp_path)


@pytest.mark.parametrize("saves", [1, 2])
def test_a_run_whose_first_save_in_the_background_failed_begins_again(saves: int, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("checkpoints: {asynchronous: true}\n")
    (tmp_path / "metrics.jsonl").write_text(SAVED * saves)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="is empty") if saves > 1 else nullcontext():
        check_resumable(tmp_path)


@pytest.mark.parametrize("name", ["rollouts", "episodes.jsonl", "metrics.jsonl", "ledger.jsonl", "log.txt"])
def test_something_else_with_the_name_of_a_file_of_the_run_is_refused(name: str, tmp_path: Path) -> None:
    if name == "rollouts":
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is a (file|folder), where the run has a"):
        check_resumable(tmp_path)


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(WhetError, match=r"log\.txt can't be written: .*Is a directory"), logging_to(tmp_path):
        pass


def test_a_log_that_was_replaced_during_the_run_is_followed(tmp_path: Path) -> None:
    with logging_to(tmp_path):
        (tmp_path / "log.txt").unlink()
        logging.getLogger("whet").info("still here")
    assert "still here" in (tmp_path / "log.txt").read_text()


def test_a_log_whose_folder_was_moved_is_written_there(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    with logging_to(folder):
        folder.rename(moved)
        folder.mkdir()
        logging.getLogger("whet").info("moved along")
    assert "moved along" in (moved / "log.txt").read_text()
    assert list(folder.iterdir()) == []


def test_a_log_whose_folder_was_removed_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with logging_to(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        logging.getLogger("whet").info("nowhere to go")


def test_a_folder_that_was_emptied_during_the_run_is_no_longer_its_place(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps: 1\n")
    place = Place(tmp_path)
    place.check()
    (tmp_path / "recipe.yaml").unlink()
    with pytest.raises(WhetError, match="moved, removed or replaced during the run"):
        place.check()


def test_a_run_ends_if_its_lock_was_removed_and_another_process_took_its_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps: 1\n")
    with run_lock(tmp_path):
        place = Place(tmp_path)
        (tmp_path / ".lock").unlink()
        place.check()
        with (tmp_path / ".lock").open("w") as other:
            place.check()
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(WhetError, match="lock was removed during the run, and another process uses"):
                place.check()
