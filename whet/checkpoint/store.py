"""The checkpoints of a run. A checkpoint is written to a hidden staging folder, flushed, given a manifest and renamed
into place; then ``latest`` is updated, and only then old checkpoints are removed. So a kill at any moment leaves the
last published checkpoint intact. The store handles folders and JSON; the learner writes the tensors.

One process writes (it holds the run's lock); any number of processes may read at the same time.
"""

import asyncio
import contextlib
import errno
import inspect
import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from whet.base.files import format_bytes, remove, room_in, sync_folder, write_atomically
from whet.base.strict_json import JsonObject
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.crash_points import crash_point
from whet.checkpoint.manifest import FILE as MANIFEST
from whet.checkpoint.manifest import CheckpointError, Manifest, check, read_manifest, seal

log = logging.getLogger(__name__)

POINTER = "latest"
STATE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"\.(staging|removed|latest)\b.*")
_REPLACED = ".replaced-"
_READINGS = 5  # of a checkpoint that a run removes meanwhile
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Which = int | Literal["best", "latest"]
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A checkpoint whose files are intact."""

    folder: Path
    step: int  # optimizer steps done
    state: JsonObject  # the argument of ``save``
    metric: float | None


class CheckpointStore:
    """The folder ``checkpoints`` of a run."""

    def __init__(self, folder: Path, config: CheckpointConfig | None = None) -> None:
        self.folder = folder
        self.config = config or CheckpointConfig()
        self._saving = asyncio.Lock()
        self._damaged: set[int] = set()  # steps of damaged checkpoints, which don't count as kept

    # Writing

    async def save(
        self,
        step: int,
        write: Callable[[Path], Awaitable[None] | None],
        state: dict[str, object],
        metric: float | None = None,
    ) -> Path:
        """Publish a checkpoint; return its folder.

        ``write(folder)`` writes the tensors (it may create subfolders); ``state`` must be JSON. ``metric`` is the value
        of ``config.best_metric`` at this step, if measured. A checkpoint of the same step is replaced. Raises
        ``CheckpointError`` if the disk is full. After an error, published checkpoints are unchanged.
        """
        encoded = json.dumps(state, indent=1, allow_nan=False).encode()
        async with self._saving:
            staging = self.folder / f".staging-{_name(step)}-{os.getpid()}"
            expected = 0
            try:
                expected = await _finish(asyncio.to_thread(self._stage, staging, step))
                crash_point("checkpoint.staged")
                result = write(staging)
                if inspect.isawaitable(result):
                    await result
                crash_point("checkpoint.half_written")
                return await _finish(asyncio.to_thread(self._publish, staging, step, encoded, metric))
            except BaseException as error:
                shutil.rmtree(staging, ignore_errors=True)
                if _disk_is_full(error):
                    raise self._no_room(step, expected, error) from error
                if isinstance(error, OSError):
                    raise CheckpointError(f"the checkpoint of step {step} can't be written: {error}") from error
                raise

    def clean(self) -> None:
        """Remove leftovers of a killed process, and restore a checkpoint that it was replacing. Called at the start of
        a run, which holds the run's lock, and by ``save``."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(_REPLACED):
                original = self.folder / path.name.removeprefix(_REPLACED)
                if original.exists():
                    remove(path)
                else:
                    path.rename(original)
            elif _LEFTOVER.fullmatch(path.name):
                log.info("removing %s, left by a process that was killed", path)
                remove(path)
        sync_folder(self.folder)

    def _stage(self, staging: Path, step: int) -> int:
        """Create the staging folder; return the expected size of the checkpoint in bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        newest = max(self._manifests().items(), default=None)
        expected = newest[1].size if newest else 0
        if expected > shutil.disk_usage(self.folder).free:
            raise self._no_room(step, expected, None)
        staging.mkdir()
        return expected

    def _publish(self, staging: Path, step: int, state: bytes, metric: float | None) -> Path:
        (staging / STATE).write_bytes(state)
        manifest = seal(staging, step, self.config.best_metric, metric)
        crash_point("checkpoint.before_manifest")
        write_atomically(staging / MANIFEST, manifest.encode())
        crash_point("checkpoint.before_rename")
        target = self.folder / _name(step)
        aside = self.folder / f"{_REPLACED}{target.name}"
        if target.exists():
            target.rename(aside)
            crash_point("checkpoint.mid_replace")
        try:
            staging.rename(target)
        except OSError:
            if aside.exists():
                aside.rename(target)
            raise
        crash_point("checkpoint.after_rename")
        sync_folder(self.folder)
        self._damaged.discard(step)
        crash_point("checkpoint.before_pointer")
        write_atomically(self.folder / POINTER, f"{target.name}\n")
        crash_point("checkpoint.before_prune")
        try:
            remove(aside)
            self._prune(step)
        except OSError as error:
            log.warning("an old checkpoint in %s could not be removed: %s", self.folder, error)
        return target

    def _prune(self, latest: int) -> None:
        """Keep the newest checkpoints, counted back from ``latest``, and the best; remove the others. Damaged ones
        don't count."""
        good = {step: m for step, m in self._manifests().items() if step not in self._damaged}
        kept = set(sorted((step for step in good if step <= latest), reverse=True)[: self.config.keep_last])
        kept |= set(self._ranked(good)[: self.config.keep_best]) | {latest}
        for step in self.steps():
            if step not in kept:
                # Rename first: a partly removed folder must never look like a checkpoint.
                doomed = self.folder / f".removed-{_name(step)}-{os.getpid()}"
                (self.folder / _name(step)).rename(doomed)
                crash_point("checkpoint.mid_prune")
                remove(doomed)
        sync_folder(self.folder)

    def _no_room(self, step: int, needed: int, error: BaseException | None) -> CheckpointError:
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        why = f" ({error})" if error else ""
        need = f"about {format_bytes(needed)}" if needed > free else "more than is available"
        advice = "Free some space, or lower checkpoints.keep_last"
        if (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY and needed <= free:
            need = f"larger files than this process may write ({format_bytes(limit)})"
            advice = "Raise that limit (ulimit -f)"
        return CheckpointError(
            f"no room for the checkpoint of step {step}: it needs {need}, and {room_in(self.folder)}{why}. "
            f"Older checkpoints are unchanged. {advice}, then resume the run"
        )

    # Reading

    def steps(self) -> list[int]:
        """Return the steps of all published checkpoints, including damaged ones, in order."""
        if not self.folder.is_dir():
            return []
        names = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def best(self) -> int | None:
        """Return the step of the best checkpoint, the later one of equals; None if the metric was never measured."""
        return next(iter(self._ranked(self._manifests())), None)

    def latest(self) -> int | None:
        """Return the step that ``latest`` names, else the highest; None if there is no checkpoint."""
        pointer = self.folder / POINTER
        try:
            if match := _STEP.fullmatch(pointer.read_text(errors="replace").strip()):
                return int(match[1])
            log.warning("%s names no checkpoint; using the highest step", pointer)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s can't be read (%s); using the highest step", pointer, error)
        return max(self.steps(), default=None)

    def load_latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if the run has none yet.

        Damaged ones are skipped with a warning. Raises ``CheckpointError`` if all are damaged: a run never silently
        starts from scratch.
        """
        latest = self.latest()
        if latest is None:
            return None
        before = [step for step in reversed(self.steps()) if step < latest]
        after = [step for step in self.steps() if step > latest]  # written before the run was resumed at ``latest``
        problems = []
        for step in [latest, *before, *after]:
            try:
                checkpoint = self.load(step)
            except CheckpointError as error:
                self._damaged.add(step)
                problems.append(str(error))
                continue
            for problem in problems:
                log.warning("%s. FALLING BACK TO STEP %d", problem, step)
            return checkpoint
        raise CheckpointError(f"no intact checkpoint in {self.folder}: {'; '.join(problems)}")

    def read(self, read: Callable[[Checkpoint], T], which: Which | None = None) -> T:
        """Return what ``read`` makes of the checkpoint that ``load`` returns. If it fails because a run that is
        training removed the checkpoint meanwhile, another one is read."""
        for _ in range(_READINGS - 1):
            with self._unless_removed():
                return read(self.load(which))
        return read(self.load(which))

    async def read_async(self, read: Callable[[Checkpoint], Awaitable[T]]) -> T:
        """``read`` with a coroutine function, of the checkpoint that ``load`` returns by default."""
        for _ in range(_READINGS - 1):
            with self._unless_removed():
                return await read(self.load())
        return await read(self.load())

    @contextlib.contextmanager
    def _unless_removed(self) -> Iterator[None]:
        """Suppress an error if a checkpoint was removed meanwhile."""
        steps = set(self.steps())
        try:
            yield
        except Exception as error:
            if steps <= set(self.steps()):  # none is gone, so that isn't why
                raise
            log.info("the checkpoints changed while one was read (%s); reading again", error)

    def load(self, which: Which | None = None) -> Checkpoint:
        """Return a checkpoint by step, the ``"best"``, or the ``"latest"`` intact one; for None the best if the metric
        was measured, else the latest. Raises ``CheckpointError`` if it does not exist or is damaged, with the file."""
        if which == "latest" or (which is None and self.best() is None):
            checkpoint = self.load_latest()
            if checkpoint is None:
                raise CheckpointError(f"{self.folder} has no checkpoint yet")
            return checkpoint
        step = self.best() if which in ("best", None) else which
        steps = self.steps()
        listed = ", ".join(map(str, steps)) or "none"
        if step is None:
            raise CheckpointError(
                f"no checkpoint in {self.folder} has a value of {self.config.best_metric}, so there is no best one. "
                f"Name a step ({listed}) or 'latest'"
            )
        if step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {listed}")
        folder = self.folder / _name(step)
        manifest = read_manifest(folder)
        check(folder, manifest, hashes=self.config.verify)
        if manifest.step != step:
            raise CheckpointError(f"checkpoint {folder} is damaged: its manifest is for step {manifest.step}")
        return Checkpoint(folder, step, json.loads((folder / STATE).read_bytes()), manifest.metric)

    def _manifests(self) -> dict[int, Manifest]:
        """Return the readable manifests by step."""
        manifests = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                manifests[step] = read_manifest(self.folder / _name(step))
        return manifests

    def _ranked(self, manifests: dict[int, Manifest]) -> list[int]:
        """Return the steps that have a value of the metric, best first."""
        sign = 1 if self.config.mode == "max" else -1
        measured = [
            (sign * m.metric, step)
            for step, m in manifests.items()
            if m.metric is not None and m.metric_name == self.config.best_metric
        ]
        return [step for _, step in sorted(measured, reverse=True)]


def _name(step: int) -> str:
    return f"step-{step:06d}"


async def _finish(work: Any) -> Any:
    """Await a thread's work even when cancelled, because it can't be stopped and writes files."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _disk_is_full(error: BaseException | None) -> bool:
    """Return True if the error or one of its causes is a full disk; safetensors has the errno only in its message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if any(f"(os error {number})" in str(error) for number in _NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False
