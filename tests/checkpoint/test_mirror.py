"""A mirror has whole copies of a run only, says what is wrong with it, and costs a run nothing when it fails."""

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from whet.base.errors import ConfigError
from whet.checkpoint import mirror as mirrors
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.mirror import Mirror, restore
from whet.checkpoint.store import CheckpointStore

DEADLINE = 300.0  # of uploads that succeed


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/remote"
    else:
        yield "memory://runs"
        fsspec.filesystem("memory").rm("/runs", recursive=True)


class Writer:
    """A run without a model: metrics that grow, and a checkpoint at each step."""

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "recipe.yaml").write_text("steps: 9")
        (folder / ".lock").write_text("a lock")
        config = CheckpointConfig(keep_last=keep_last, keep_best=0)
        self.store = CheckpointStore(folder / "checkpoints", config)

    async def step(self, mirror: Mirror, step: int) -> bool:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        await self.store.save(step, lambda into: (into / "weights").write_text(f"of step {step}") and None, {})
        return await mirror.copy(self.folder, step, self.store.steps())


def mirrored(run: Writer, url: str, steps: int = 4) -> None:
    async def go() -> None:
        mirror = Mirror(url, "one", DEADLINE)
        await mirror.begin(None)
        for step in range(1, steps + 1):
            assert await run.step(mirror, step)

    asyncio.run(go())


def names(url: str, below: str = "") -> list[str]:
    system, root = fsspec.core.url_to_fs(f"{url}/one{below}")
    return sorted(path.rpartition("/")[2] for path in system.ls(root, detail=False))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def content_of(url: str, text: str) -> str:
    """Return the path of the file with this content in the mirror."""
    system, root = fsspec.core.url_to_fs(f"{url}/one/files")
    return next(path for path in system.ls(root, detail=False) if system.cat_file(path) == text.encode())


def test_the_restored_folder_is_the_run(url: str, tmp_path: Path) -> None:
    run = Writer(tmp_path / "run")
    mirrored(run, url)
    assert restore(f"{url}/one/", tmp_path / "there") == 4
    assert contents(tmp_path / "there") == contents(run.folder)
    assert CheckpointStore(tmp_path / "there/checkpoints").steps() == [3, 4]


def test_copies_are_removed_with_their_checkpoints(url: str, tmp_path: Path) -> None:
    mirrored(Writer(tmp_path / "run", keep_last=1), url)
    assert names(url) == ["README.txt", "files", "step-000004.json"]
    assert len(names(url, "/files")) == len(contents(tmp_path / "run"))


@pytest.mark.parametrize("harm", ["missing", "changed"])
def test_a_damaged_copy_is_left_out_for_the_one_before(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    mirrored(Writer(tmp_path / "run"), url)
    path = content_of(url, "of step 4")
    system = fsspec.core.url_to_fs(url)[0]
    if harm == "missing":
        system.rm_file(path)
    else:
        system.pipe_file(path, b"of step 5")
    assert restore(f"{url}/one", tmp_path / "there") == 3
    assert CheckpointStore(tmp_path / "there/checkpoints").load_latest().step == 3  # type: ignore[union-attr]
    assert (tmp_path / "there/metrics.jsonl").read_text().count("\n") == 3
    assert "the copy of step 4" in caplog.text
    assert f"(weights) {'is missing' if harm == 'missing' else 'has changed'}" in caplog.text


def test_a_marker_that_is_cut_off_is_not_a_copy(url: str, tmp_path: Path) -> None:
    mirrored(Writer(tmp_path / "run"), url)
    system, root = fsspec.core.url_to_fs(f"{url}/one/step-000004.json")
    system.pipe_file(root, system.cat_file(root)[:-40])
    assert restore(f"{url}/one", tmp_path / "there") == 3


def test_an_older_checkpoint_that_is_damaged_is_left_out(url: str, tmp_path: Path) -> None:
    mirrored(Writer(tmp_path / "run"), url)
    fsspec.core.url_to_fs(url)[0].rm_file(content_of(url, "of step 3"))
    assert restore(f"{url}/one", tmp_path / "there") == 4
    assert CheckpointStore(tmp_path / "there/checkpoints").steps() == [4]


def test_without_an_intact_copy_nothing_is_left_behind(url: str, tmp_path: Path) -> None:
    mirrored(Writer(tmp_path / "run", keep_last=1), url)
    fsspec.core.url_to_fs(url)[0].rm_file(content_of(url, "of step 4"))
    with pytest.raises(CheckpointError, match=r"the copy of step 4 .* is damaged: .*\(weights\) is missing"):
        restore(f"{url}/one", tmp_path / "there")
    with pytest.raises(CheckpointError, match="no complete copy of a run"):
        restore(f"{url}/two", tmp_path / "there")
    (tmp_path / "run/recipe.yaml").touch()
    with pytest.raises(CheckpointError, match=rf"is a run folder and not a mirror: whet resume {tmp_path}/run"):
        restore(f"file://{tmp_path}/run", tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "remote") == ["run"]


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    mirrored(Writer(tmp_path / "run", keep_last=1), url)
    remote = mirrors.Remote(f"{url}/one")
    marker = remote.markers()[4]
    assert marker is not None
    files = {f"../{name}": entry for name, entry in marker.files.items()}
    remote.write("step-000004.json", marker.model_copy(update={"files": files}).encode())
    with pytest.raises(CheckpointError, match="which is not in a run folder"):
        restore(f"{url}/one", tmp_path / "there")


def test_an_upload_that_fails_is_repeated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failures = mirrors.Remote.write_content, iter([OSError("the network is down")])

    def flaky(*arguments: object) -> None:
        if error := next(failures, None):
            raise error
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mirrors.Remote, "write_content", flaky)
    mirrored(Writer(tmp_path / "run"), url, steps=1)
    assert restore(f"{url}/one", tmp_path / "there") == 1


@pytest.mark.parametrize("way", ["fails", "hangs"])
def test_after_the_deadline_the_run_continues_and_the_copy_before_is_whole(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    run, end = Writer(tmp_path / "run"), threading.Event()
    mirrored(run, url, steps=2)

    def broken(*arguments: object) -> None:
        if way == "hangs":
            end.wait(600)
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(mirrors.Remote, "write_content", broken)
        assert not asyncio.run(run.step(Mirror(url, "one", 0.5), 3))
        end.set()
    assert "THE CHECKPOINT OF STEP 3 IS NOT IN ITS MIRROR" in caplog.text
    assert "checkpoints.mirror_deadline = 0.5 s is over" in caplog.text
    assert restore(f"{url}/one", tmp_path / "before") == 2
    assert asyncio.run(run.step(Mirror(url, "one", DEADLINE), 4))
    assert restore(f"{url}/one", tmp_path / "after") == 4


def test_a_run_that_is_resumed_copies_the_checkpoint_that_its_mirror_lacks(url: str, tmp_path: Path) -> None:
    run = Writer(tmp_path / "one")
    mirrored(run, url, steps=2)
    asyncio.run(run.store.save(3, lambda into: (into / "weights").write_text("of step 3") and None, {}))
    run.store.config = CheckpointConfig(mirror=url, keep_last=2)
    assert asyncio.run(Mirror.of(run.store, 3)) is not None
    assert restore(f"{url}/one", tmp_path / "there") == 3


def test_a_mirror_belongs_to_one_run(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Writer(tmp_path / "run")
    mirrored(run, url)
    mirror = Mirror(url, "one", DEADLINE)
    asyncio.run(mirror.begin(4))
    with pytest.raises(ConfigError, match=r"has a copy of step 4, of another run .* whet resume .*/one --folder"):
        asyncio.run(mirror.begin(None))
    with pytest.raises(ConfigError, match="has not come so far"):
        asyncio.run(mirror.begin(3))
    with caplog.at_level(logging.WARNING):
        assert not asyncio.run(mirror.copy(run.folder, 3, [3]))
    assert "another process continues this run" in caplog.text


def test_an_address_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"xyz://a/one can't be used: .*xyz"):
        Mirror("xyz://a", "one", DEADLINE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/one can't be read and written: .*credentials"):
        asyncio.run(Mirror(f"file://{tmp_path}/file", "one", DEADLINE).begin(None))
    with pytest.raises(ValueError, match="write file:///mnt/runs"):
        CheckpointConfig(mirror="/mnt/runs")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"needs a package that is not installed\. Install s3fs"):
        Mirror("s3://bucket/runs", "one", DEADLINE)


def test_a_bucket_that_is_missing_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = mirrors.Remote("memory://bucket/runs/one")
    remote._root = "bucket/runs/one"  # as s3fs has it; folders begin with a slash
    monkeypatch.setattr(remote._system, "makedirs", lambda *_, **__: pytest.fail("a bucket was made"))
    remote.write("README.txt", b"text")
    remote._system.rm("/bucket", recursive=True)
