"""A copy of a run at a URL of fsspec (``s3://``, ``gs://``, ``file://``), from which another machine resumes it.

URL/NAME/files/<sha256>      the content of a file of the run folder, uploaded once
URL/NAME/step-000050.json    name, size and SHA-256 of every file at this checkpoint: the marker, uploaded last

A kill or an error at any moment leaves every earlier marker with all its files. The run waits for an upload until the
deadline; then it continues without, with a warning.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shlex
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Self, TypeVar

from whet.base.errors import ConfigError
from whet.base.files import remove, replacing
from whet.checkpoint.crash_points import crash_point
from whet.checkpoint.manifest import CheckpointError, Entry, Manifest
from whet.checkpoint.mirror_files import PIECE, Remote, plain
from whet.checkpoint.store import CheckpointStore
from whet.processes.threads import run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PAUSE = 30.0  # seconds between two attempts


class Mirror:
    """The copies of one run. ``deadline``: seconds for one of them, with all attempts."""

    def __init__(self, url: str, name: str, deadline: float) -> None:
        self.url, self._deadline = f"{url.rstrip('/')}/{name}", deadline
        self._remote = Remote(self.url)
        self._problem = "no answer"  # of the last attempt

    @classmethod
    async def of(cls, store: CheckpointStore, step: int | None) -> Self | None:
        """Return the mirror of a run that begins at ``step`` (see ``begin``), if the settings have one. A checkpoint
        that did not reach it before is copied now."""
        config, run = store.config, store.folder.parent
        if config.mirror is None:
            return None
        mirror = cls(config.mirror, run.name, config.mirror_deadline)
        if await mirror.begin(step) < (step or 0):
            await mirror.copy(run, step or 0, store.steps())
        return mirror

    async def begin(self, step: int | None) -> int:
        """Check that the URL can be written and has no copy that is newer than ``step``, the step that the run resumes
        at; None for a new run. Return the step of the newest copy, or 0. Raises ``ConfigError``."""
        try:
            return await self._in_time(partial(self._check, step))
        except TimeoutError:
            raise ConfigError(f"{self._remote.what}: no answer within {self._deadline:g} s") from None

    async def copy(self, run: Path, step: int, kept: Collection[int]) -> bool:
        """Upload the run folder as it is after the checkpoint of ``step`` was published. Copies of steps that are not
        among ``kept`` are removed afterwards. Return False, after a warning, if that fails until the deadline."""
        ended = threading.Event()
        try:
            await self._in_time(partial(self._persist, run, step, kept, ended))
            return True
        except (TimeoutError, CheckpointError) as error:
            why = f"{error}" or f"{self._problem} (checkpoints.mirror_deadline = {self._deadline:g} s is over)"
            text = "THE CHECKPOINT OF STEP %d IS NOT IN ITS MIRROR %s: %s. It is intact in %s, and the run continues"
            log.warning(text, step, self.url, why, run)
            return False
        finally:
            ended.set()

    async def _in_time(self, call: Callable[[], T]) -> T:
        async with asyncio.timeout(self._deadline):
            return await run_in_thread(call, "whet-mirror")

    def _check(self, step: int | None) -> int:
        with self._remote.errors(ConfigError):
            newest = max(self._remote.markers(), default=0)
            if newest > (step or 0):
                raise ConfigError(
                    f"checkpoints.mirror: {self.url} has a copy of step {newest}, "
                    + ("of another run with this name. " if step is None else "but this folder has not come so far. ")
                    + f"To continue there: whet resume {self.url} --folder FOLDER. Otherwise choose another mirror, or "
                    "remove that one"
                )
            text = f"A run of whet. To resume it elsewhere: whet resume {self.url}\n"
            self._remote.write("README.txt", text.encode())
        return newest

    def _persist(self, run: Path, step: int, kept: Collection[int], ended: threading.Event) -> None:
        pause = 1.0
        while not ended.is_set():
            try:
                self._upload(run, step, kept, ended)
                return
            except CheckpointError:
                raise
            except Exception as error:
                self._problem = plain(error)
                log.info("the upload of step %d to %s failed and is repeated: %s", step, self.url, self._problem)
            ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _upload(self, run: Path, step: int, kept: Collection[int], ended: threading.Event) -> None:
        markers = self._remote.markers()
        if max(markers, default=0) > step:
            raise CheckpointError(f"it has a copy of step {max(markers)}: another process continues this run there")
        referenced = {entry.sha256 for marker in markers.values() if marker for entry in marker.files.values()}
        there = {name: size for name, size in self._remote.contents().items() if name in referenced}
        files = {}
        for path in _files(run, step):
            name = path.relative_to(run).as_posix()
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size  # a file that grows meanwhile is copied up to here
                content = hashlib.sha256()
                for piece in _pieces(file, size):
                    content.update(piece)
                sha256 = content.hexdigest()
                if there.get(sha256) != size:
                    file.seek(0)
                    self._remote.write_content(sha256, size, _until(ended, _pieces(file, size)))
                    there[sha256] = size
                    crash_point("mirror.half_uploaded")
            files[name] = Entry(size=size, sha256=sha256)
        crash_point("mirror.before_marker")
        marker = Manifest(step=step, metric_name="", metric=None, files=files)
        if ended.is_set():
            raise _EndedError
        self._remote.write(f"step-{step:06d}.json", marker.encode())
        crash_point("mirror.before_prune")
        self._prune({**markers, step: marker}, {*kept, step})
        log.info("step %d is in the mirror %s", step, self.url)

    def _prune(self, markers: dict[int, Manifest | None], kept: Collection[int]) -> None:
        """Remove markers first: a marker must never lack a file."""
        for step in markers.keys() - set(kept):
            self._remote.remove(f"step-{step:06d}.json")
        left = (marker for step, marker in markers.items() if marker and step in kept)
        referenced = {entry.sha256 for marker in left for entry in marker.files.values()}
        for sha256 in self._remote.contents().keys() - referenced:
            self._remote.remove(f"files/{sha256}")


def restore(url: str, folder: Path) -> int:
    """Download the newest intact copy of a run, and the checkpoints of the older ones, into a new folder. Return its
    step. Raises ``WhetError`` if there is none; nothing is left in the folder then."""
    remote = Remote(url.rstrip("/"))
    with remote.errors(CheckpointError):
        markers = remote.markers()
    if not markers:
        here = Path(url.removeprefix("file://"))
        if url.startswith("file://") and (here / "recipe.yaml").is_file():
            raise CheckpointError(f"{url} is a run folder and not a mirror: whet resume {shlex.quote(str(here))}")
        raise CheckpointError(f"{url} has no complete copy of a run (no step-....json)")
    newest: int | None = None
    problems = []
    with replacing(folder) as staging:
        for step, marker in sorted(markers.items(), reverse=True):
            try:
                if marker is None:
                    raise CheckpointError(f"step-{step:06d}.json is damaged")
                only = "" if newest is None else f"checkpoints/step-{step:06d}/"
                with remote.errors(CheckpointError):
                    for name, entry in marker.files.items():
                        if name.startswith(only):
                            remote.download(entry, staging / _safe(name))
            except CheckpointError as error:
                remove(staging if newest is None else staging / "checkpoints" / f"step-{step:06d}")
                problems.append(f"the copy of step {step} in {url} is damaged: {error}")
                continue
            newest = step if newest is None else newest
        if newest is None:
            raise CheckpointError("; ".join(problems))
    for problem in problems:
        log.warning("%s. It is left out", problem)
    return newest


class _EndedError(Exception):
    """The upload is not waited for any more."""


def _files(run: Path, step: int) -> Iterator[Path]:
    """Yield the files that a resume at ``step`` needs: all but hidden ones (locks, half-written files) and other
    checkpoints."""
    others = re.compile(rf"checkpoints/step-(?!{step:06d}/).*")
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run)
        hidden = any(part.startswith(".") for part in name.parts)
        if not (hidden or path.is_symlink() or others.fullmatch(name.as_posix())) and path.is_file():
            yield path


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes. Raises ``OSError`` if the file has become shorter."""
    while size:
        piece = file.read(min(PIECE, size))
        if not piece:
            raise OSError(f"{file.name} became shorter while it was read")
        size -= len(piece)
        yield piece


def _until(ended: threading.Event, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if ended.is_set():
            raise _EndedError
        yield piece


def _safe(name: str) -> str:
    """Raises ``CheckpointError`` for a name that leads out of the run folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"its marker names {json.dumps(name)}, which is not in a run folder")
    return name
