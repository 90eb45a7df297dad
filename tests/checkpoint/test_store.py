"""Checkpoints are kept, verified and removed as configured, and survive damaged files and full disks."""

import asyncio
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.writer import Save, assert_intact, contents, save_all, write_contents
from whet.base.errors import WhetError
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.store import Checkpoint, CheckpointStore


def store_with(folder: Path, saves: list[Save], **settings: object) -> CheckpointStore:
    config = CheckpointConfig.model_validate(settings)
    asyncio.run(save_all(folder, saves, config))
    return CheckpointStore(folder, config)


def test_a_saved_checkpoint_is_loaded(tmp_path: Path) -> None:
    store = store_with(tmp_path / "checkpoints", [(10, 0.5, 7)])
    checkpoint = store.load("latest")
    assert (checkpoint.step, checkpoint.metric, checkpoint.state) == (10, 0.5, {"seed": 7})
    assert_intact(checkpoint)
    assert store.load("best") == store.load(10) == checkpoint
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000010\n"


def test_another_checkpoint_is_read_where_a_run_removes_the_one_that_is_being_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(1, None, 1)], keep_last=1, keep_best=0)

    def read(checkpoint: Checkpoint) -> bytes:
        if checkpoint.step == 1:
            asyncio.run(save_all(tmp_path, [(2, None, 2)], store.config))
        return (checkpoint.folder / "manifest.json").read_bytes()

    assert store.read(read) == (tmp_path / "step-000002" / "manifest.json").read_bytes()
    with pytest.raises(FileNotFoundError):
        store.read(lambda checkpoint: (checkpoint.folder / "nothing").read_bytes())
    with pytest.raises(CheckpointError, match="has no checkpoint of step 1; it has 2"):
        store.read(read, 1)


def test_a_reading_that_awaits_is_repeated_too(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(1, None, 1)], keep_last=1, keep_best=0)

    async def read(checkpoint: Checkpoint) -> bytes:
        if checkpoint.step == 1:
            await save_all(tmp_path, [(2, None, 2)], store.config)
        return (checkpoint.folder / "manifest.json").read_bytes()

    assert asyncio.run(store.read_async(read)) == (tmp_path / "step-000002" / "manifest.json").read_bytes()


def test_a_reading_that_fails_is_not_repeated_because_a_run_saved_another_checkpoint(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(1, None, 1)], keep_last=2)
    read: list[int] = []

    def fails(checkpoint: Checkpoint) -> None:
        read.append(checkpoint.step)
        asyncio.run(save_all(tmp_path, [(2, None, 2)], store.config))
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        store.read(fails)
    assert read == [1]


def test_the_callback_may_be_a_coroutine(tmp_path: Path) -> None:
    async def write(folder: Path) -> None:
        await asyncio.sleep(0)
        write_contents(folder, 3)

    store = CheckpointStore(tmp_path)
    asyncio.run(store.save(1, write, {"seed": 3}))
    assert_intact(store.load(1))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saves: list[Save] = [(1, 0.9, 1), (2, 0.1, 2), (3, 0.5, 3), (4, None, 4), (5, float("nan"), 5)]
    assert store_with(tmp_path / "a", saves, keep_last=2, keep_best=1).steps() == [1, 4, 5]
    assert store_with(tmp_path / "b", saves, keep_last=1, keep_best=2).steps() == [1, 3, 5]
    assert store_with(tmp_path / "c", saves, keep_last=1, keep_best=1, mode="min").steps() == [2, 5]
    assert store_with(tmp_path / "d", saves, keep_last=1, keep_best=0).steps() == [5]


def test_the_later_of_two_equally_good_checkpoints_is_the_best(tmp_path: Path) -> None:
    assert store_with(tmp_path, [(1, 0.5, 1), (2, 0.5, 2)]).best() == 2


def test_checkpoints_with_another_metric_are_never_the_best(tmp_path: Path) -> None:
    asyncio.run(save_all(tmp_path, [(1, 0.9, 1)], CheckpointConfig(best_metric="evaluation/reward")))
    store = store_with(tmp_path, [(2, 0.1, 2)])
    assert store.best() == 2


def test_a_run_resumed_from_an_older_step_continues_from_there(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1), (20, None, 2), (30, None, 3), (15, None, 4)], keep_last=2)
    assert store.load("latest").state == {"seed": 4}
    assert store.steps() == [15]


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1), (10, None, 2)])
    assert_intact(store.load(10))
    assert store.load(10).state == {"seed": 2}


def test_without_checkpoints_there_is_nothing_to_resume_and_no_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    store.clean()
    assert store.load_latest() is None
    for which in ("latest", "best", 3):
        with pytest.raises(CheckpointError):
            store.load(which)  # type: ignore[arg-type]


def test_a_missing_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1)])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; it has 10"):
        store.load(7)
    with pytest.raises(CheckpointError, match="evaluation/accuracy"):
        store.load("best")


@pytest.mark.parametrize("name", [*contents(0), "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "grow"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_with(tmp_path, [(10, None, 1), (20, None, 2)])
    path = tmp_path / "step-000020" / name
    data = path.read_bytes()
    damaged = {
        "flip": data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
        "truncate": data[:-1],
        "grow": data + b" ",
    }
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])

    with pytest.raises(CheckpointError, match=name):
        store.load(20)
    with caplog.at_level(logging.WARNING):
        checkpoint = store.load_latest()
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert name in caplog.text
    assert "FALLING BACK TO STEP 10" in caplog.text


def test_a_change_of_any_byte_of_a_manifest_is_detected(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, 0.5, 1)])
    path = tmp_path / "step-000010" / "manifest.json"
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="manifest"):
            store.load(10)


def test_a_surplus_file_is_detected(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1)])
    (tmp_path / "step-000010" / "policy" / "extra.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"policy/extra\.bin does not belong"):
        store.load(10)


def test_without_hashes_sizes_and_names_are_still_verified(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1)], verify=False)
    path = tmp_path / "step-000010" / "policy" / "model.safetensors"
    path.write_bytes(b"x" * 5000)
    assert store.load(10).step == 10
    path.write_bytes(b"x" * 4999)
    with pytest.raises(CheckpointError, match="4999 bytes instead of 5000"):
        store.load(10)
    path.write_bytes(b"x" * 5000)
    state = tmp_path / "step-000010" / "state.json"
    state.write_bytes(state.read_bytes().replace(b"e", b"d"))
    with pytest.raises(CheckpointError, match=r"state\.json has changed"):
        store.load(10)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1), (20, None, 2)])
    for step in ("step-000010", "step-000020"):
        (tmp_path / step / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint(.|\n)*step-000020(.|\n)*step-000010"):
        store.load_latest()
    shutil.rmtree(tmp_path / "step-000010")
    shutil.rmtree(tmp_path / "step-000020")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 20"):
        CheckpointStore(tmp_path).load_latest()


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1), (20, None, 2)], keep_last=2)
    (tmp_path / "step-000020" / "policy" / "model.safetensors").write_bytes(b"x" * 5000)
    assert store.load("latest").step == 10
    asyncio.run(store.save(30, lambda folder: write_contents(folder, 3), {"seed": 3}))
    assert store.steps() == [10, 30]


def test_an_invalid_pointer_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(tmp_path, [(10, None, 1), (20, None, 2)])
    (tmp_path / "latest").write_bytes(b"\xff../../etc")
    assert store.load("latest").step == 20
    assert "names no checkpoint" in caplog.text
    (tmp_path / "latest").unlink()
    assert store.load("latest").step == 20


def test_a_folder_in_place_of_the_pointer_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(tmp_path, [(10, None, 1)])
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert store.load("latest").step == 10
    assert f"{tmp_path}/latest can't be read" in caplog.text
    with pytest.raises(WhetError, match=r"latest can't be written: .*Is a directory"):
        asyncio.run(store.save(20, lambda folder: write_contents(folder, 2), {"seed": 2}))
    assert_intact(store.load(10))


def test_a_file_in_place_of_a_checkpoint_folder_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1)])
    (tmp_path / "step-000020").write_text("?")
    (tmp_path / "latest").unlink()
    assert store.load("latest").step == 10
    with pytest.raises(CheckpointError, match=r"step-000020.* can't be read"):
        store.load(20)


def test_pruning_removes_a_symbolic_link_and_not_its_target(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    store = store_with(folder, [(10, None, 1)], keep_last=1)
    (folder / "step-000010").rename(elsewhere)
    (folder / "step-000010").symlink_to(elsewhere)
    assert_intact(store.load(10))
    (folder / ".staging-step-000005-1").symlink_to(tmp_path)
    asyncio.run(store.save(20, lambda staging: write_contents(staging, 2), {"seed": 2}))
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000020"]
    assert (elsewhere / "manifest.json").exists()


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 can't be written: .*run/checkpoints"):
        asyncio.run(CheckpointStore(tmp_path / "run" / "checkpoints").save(1, lambda folder: None, {}))


def test_unrelated_files_are_not_removed(tmp_path: Path) -> None:
    for name in ("step-000001.bak", "notes.txt", ".hidden"):
        (tmp_path / name).mkdir()
    store_with(tmp_path, [(1, None, 1), (2, None, 2), (3, None, 3)], keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step-000001.bak", "notes.txt", ".hidden", "latest", "step-000003")
    }


def test_a_failing_callback_changes_nothing(tmp_path: Path) -> None:
    store = store_with(tmp_path, [(10, None, 1)])

    def fail(folder: Path) -> None:
        write_contents(folder, 2)
        raise RuntimeError("the learner died")

    with pytest.raises(RuntimeError, match="the learner died"):
        asyncio.run(store.save(20, fail, {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010"]
    assert_intact(store.load("latest"))


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for state in ({"loss": float("nan")}, {"tensor": object()}):
        with pytest.raises((ValueError, TypeError)):
            asyncio.run(store.save(1, lambda folder: write_contents(folder, 1), state))
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_save_publishes_an_intact_checkpoint_or_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    async def cancelled(after: float) -> None:
        def write(folder: Path) -> None:
            (folder / "big").write_bytes(os.urandom(20_000_000))

        saving = asyncio.create_task(store.save(1, write, {"seed": 0}))
        await asyncio.sleep(after)
        if saving.cancel():  # and it had not ended
            with pytest.raises(asyncio.CancelledError):
                await saving

    for after in (0.0, 0.001, 0.02):
        asyncio.run(cancelled(after))
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".staging")]
        for step in store.steps():
            store.load(step)


def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    # A limit on file size replaces a full disk: it needs neither privileges nor a mount.
    script = (
        "import asyncio, resource, sys\n"
        "from pathlib import Path\n"
        "from tests.checkpoint.writer import save_all\n"
        "from whet.checkpoint.manifest import CheckpointError\n"
        "asyncio.run(save_all(Path(sys.argv[1]), [(10, None, 1)]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    asyncio.run(save_all(Path(sys.argv[1]), [(20, None, 2)]))\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "no room for the checkpoint of step 20" in done.stdout, done.stderr
    assert "it needs larger files than this process may write (4.0 KiB)" in done.stdout
    assert "Raise that limit (ulimit -f), then resume the run" in done.stdout
    assert "Older checkpoints are unchanged" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010"]
    assert_intact(CheckpointStore(tmp_path).load("latest"))


def test_too_little_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(tmp_path, [(10, None, 1)])
    nearly_full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    called = []
    with pytest.raises(CheckpointError, match=r"needs about 4\.9 KiB, and 100 B are free"):
        asyncio.run(store.save(20, called.append, {}))
    assert called == []
    assert store.load("latest").step == 10


def test_a_disk_without_room_for_the_folder_of_checkpoints_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=rf"no room .* are free in {tmp_path} \(.*No space left on device"):
        asyncio.run(CheckpointStore(tmp_path / "checkpoints").save(1, lambda folder: None, {}))


def test_readers_always_find_an_intact_checkpoint_during_a_save(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=20, keep_best=0)
    asyncio.run(save_all(tmp_path, [(1, None, 1), (2, None, 2)], config))
    saves: list[Save] = [(step, None, step) for step in range(3, 12)]
    writer = threading.Thread(target=lambda: asyncio.run(save_all(tmp_path, saves, config)))
    writer.start()
    seen = []
    end = time.monotonic() + 60
    while writer.is_alive() and time.monotonic() < end:
        checkpoint = CheckpointStore(tmp_path, config).load_latest()
        assert checkpoint is not None
        seen.append(checkpoint.step)
    writer.join()
    assert seen == sorted(seen)
    assert CheckpointStore(tmp_path).load("latest").step == 11


def test_a_checkpoint_is_due_every_n_steps_and_at_the_end() -> None:
    assert [step for step in range(1, 8) if CheckpointConfig(every=3).due(step, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if CheckpointConfig(every=0).due(step, 7)] == [7]


def test_the_manifest_can_be_verified_without_whet(tmp_path: Path) -> None:
    import hashlib

    store_with(tmp_path, [(10, 0.5, 1)])
    folder = tmp_path / "step-000010"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
