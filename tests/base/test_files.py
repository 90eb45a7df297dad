"""Files are written completely or not at all; tensors survive saving regardless of their memory layout."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import whet
from whet.base import files
from whet.base.errors import ConfigError, WhetError
from whet.base.files import check_writable, expanded, load_tensors, remove, replacing, save_tensors, write_atomically
from whet.base.staged_folder import staged_folder
from whet.checkpoint.export import export
from whet.cli.main import main
from whet.prep.prepare import prepare
from whet.run import run as run_module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, "grüße")
    assert path.read_text(encoding="utf-8") == "grüße"
    write_atomically(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert names(path.parent) == ["file"]


def test_a_folder_takes_the_place_of_another_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("first", "second"):
        with replacing(path) as staging:
            (staging / "below").mkdir(parents=True)
            (staging / "below" / name).write_text(name)
            assert not (path / "below" / name).exists()
        assert names(path / "below") == [name]
    assert names(tmp_path) == ["folder"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no call that swaps two names")
def test_a_folder_that_is_replaced_exists_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()

    def killed(self: Path, target: Path) -> Path:
        raise AssertionError("a kill after this rename would leave no folder")

    monkeypatch.setattr(Path, "rename", killed)
    with replacing(path) as staging:
        staging.mkdir()
        (staging / "new").touch()
    assert names(path) == ["new"]
    assert names(tmp_path) == ["folder"]


def test_a_folder_is_replaced_where_the_system_cannot_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_swapped", lambda *_: False)
    path = tmp_path / "folder"
    for name in ("old", "new"):
        with replacing(path) as staging:
            staging.mkdir()
            (staging / name).touch()
    assert names(path) == ["new"]
    assert names(tmp_path) == ["folder"]


def test_temporary_files_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from whet.base.files import replacing
with replacing(pathlib.Path({str(tmp_path / "step-000001.jsonl")!r})) as staging:
    staging.write_text("half")
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    for name in (".hidden", f".live.{os.getpid()}-00000000", "kept"):
        (tmp_path / name).touch()
    assert len(names(tmp_path)) == 4
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", f".live.{os.getpid()}-00000000", "kept"]


@pytest.mark.parametrize("old", [None, "file", "folder"])
def test_a_failed_replacement_leaves_only_the_old_file(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "it"
    if old == "file":
        path.write_text("old")
    elif old == "folder":
        path.mkdir()

    def half() -> None:
        with replacing(path) as staging:
            staging.mkdir()
            (staging / "half").write_text("half of it")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert names(tmp_path) == (["it"] if old else [])
    assert old != "file" or path.read_text() == "old"


def test_an_error_names_no_temporary_file() -> None:
    for write in (lambda path: write_atomically(path, "x"), lambda path: staged_folder(path).__enter__()):
        with pytest.raises(WhetError, match=r"^/proc/x can't be written: \[Errno 2\] No such file or directory$"):
            write(Path("/proc/x"))


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest" / "full").mkdir(parents=True)
    with pytest.raises(WhetError, match=r"latest can't be written: \[Errno 21\] Is a directory$"):
        write_atomically(tmp_path / "latest", "x")
    assert names(tmp_path) == ["latest"]


def read_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Have this process, which may be root's, see the folders as read-only."""
    real = os.access
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path) not in folders and real(path, mode))


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a" / "b")
    read_only(monkeypatch, tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match=f"^{folder} can't be written: .*into {tmp_path}, or its file system is"):
            check_writable(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"file/a/b can't be written: {tmp_path}/file is a file, not a folder"):
        check_writable(tmp_path / "file/a/b")


@pytest.mark.parametrize(
    "command",
    [
        lambda run, _: whet.resume(run),
        lambda run, _: main(["resume", str(run)]),
        lambda _, away: whet.start("quickstart", folder=away),
        lambda _, away: whet.train(model="m", data=[{"prompt": "x", "completion": "y"}], folder=away),
        lambda _, away: main(["train", "quickstart", "--folder", str(away)]),
        lambda run, away: export(run, away),
        lambda _, away: prepare(None, away),
        lambda _, away: main(["attack", "arithmetic", "--out", str(away)]),
        lambda _, away: main(["pipeline", "rlhf", "-c", "tiny", "--folder", str(away)]),
    ],
)
def test_nothing_begins_whose_result_can_not_be_written(
    command: Callable[[Path, Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("extends: quickstart")
    read_only(monkeypatch, tmp_path, run)
    monkeypatch.setattr(run_module, "_train", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises((ConfigError, SystemExit)) as caught:
        command(run, tmp_path / "away")
    assert "can't be written: you have no permission to write into" in capsys.readouterr().err + str(caught.value)


def test_an_export_does_not_replace_an_empty_folder_that_is_write_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    read_only(monkeypatch, tmp_path / "kept")
    with pytest.raises(ConfigError, match="kept can't be written: you have no permission"):
        export(tmp_path / "run", tmp_path / "kept")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "file").write_text("old")

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "_flush", refuse)
    room = rf"; \d.* are free in {tmp_path}$" if number == errno.ENOSPC else "'?$"
    with pytest.raises(WhetError, match=rf"file can't be written: .*{os.strerror(number)}{room}"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), Exception("No space left (os error 28)")], ids=["C", "Rust"]
)
def test_a_file_system_that_can_hold_no_further_file_is_an_error_that_says_so(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise error

    monkeypatch.setattr(Path, "write_bytes", refuse)
    full = SimpleNamespace(f_frsize=1, f_blocks=9, f_bfree=9, f_bavail=9, f_files=100, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        WhetError, match=rf"file can't be written: .* free in {tmp_path}, for 0 further files \(inodes\)$"
    ):
        write_atomically(tmp_path / "file", "new")


def test_tensors_in_a_folder_that_disappears_are_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(tensors: object, path: Path, metadata: object) -> None:
        shutil.rmtree(tmp_path / "run")
        save_file({"x": torch.zeros(1)}, path)

    save_file = safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", vanish)
    with pytest.raises(WhetError, match=r"run/model can't be written: .*No such file"):
        save_tensors(tmp_path / "run" / "model", {"x": torch.zeros(1)})


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "folder" / "below").mkdir(parents=True)
    for name in ("link", "folder", "nothing"):
        remove(tmp_path / name)
    assert names(tmp_path) == ["there"]


def test_tensors_survive_saving_bit_for_bit_in_any_layout(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "plain": base,
        "transposed": base.T,
        "tied": base,
        "row": base[2],
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(3),
        "half": base.bfloat16(),
        "bits": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "negative_zero": torch.tensor([-0.0, float("nan")]),
        "trained": torch.nn.Parameter(base.clone()),
    }
    save_tensors(tmp_path / "a.safetensors", tensors)
    found = load_tensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].flatten().view(torch.uint8), tensor.detach().contiguous().flatten().view(torch.uint8)
        )
    assert names(tmp_path) == ["a.safetensors"]


def test_a_missing_or_damaged_tensor_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(WhetError, match=r"a\.safetensors"):
        load_tensors(path)
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WhetError, match=r"a\.safetensors"):
        load_tensors(path)


def test_importing_the_module_does_not_import_torch() -> None:
    script = (
        "import sys, whet.base.files, whet.checkpoint.config, whet.checkpoint.crash_points\n"
        "import whet.checkpoint.lock, whet.checkpoint.store, whet.checkpoint.export\n"
        "print([name for name in ('torch', 'transformers', 'safetensors', 'peft') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_the_home_folder_of_an_unknown_user_is_an_ordinary_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert expanded("~/a") == Path.home() / "a"
    assert expanded("~no-such-user/a") == Path("~no-such-user/a")
    for words in (["eval", "~no-such-user/run"], ["show", "~no-such-user/a.yaml"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "RuntimeError" not in capsys.readouterr().err


def test_the_home_folder_in_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ``--out=~/prepared`` as it is, and a folder with the name ~ was written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("blend.yaml").write_text("sources: {mine: {rows: {type: supervised, path: rows.jsonl}}}")
    with pytest.raises(SystemExit) as ended:
        main(["prep", "blend.yaml", "--out=~/prepared"])
    assert not ended.value.code
    assert (tmp_path / "prepared" / "manifest.json").is_file()
