"""The folder of a run: finding a name for it, checking that it is free, making it, and noticing that it was moved.
Imports nothing heavy: the command line checks before anything is loaded."""

import logging
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.addresses import check_no_password
from whet.base.errors import ConfigError, WhetError
from whet.base.files import check_unicode, check_writable
from whet.checkpoint.config import PASSWORD
from whet.checkpoint.lock import FILE as LOCK
from whet.checkpoint.lock import is_locked
from whet.config.issues import RecipeError
from whet.config.yaml_text import parse_mapping

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

LEFT_BY_A_FAILED_START = {
    "recipe.yaml", "machine.json", "lineage.json", "log.txt", "error.log", LOCK, "rows.jsonl", "test.jsonl", "launch"
}  # fmt: skip

FILES_OF_A_RUN = ("metrics.jsonl", "episodes.jsonl", "ledger.jsonl", "log.txt", "machine.json", "lineage.json")


def new_folder(name: str) -> Path:
    """Return a folder name that is not taken: ``runs/<name>-<date>-<time>``. Nothing is created yet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{name}-{stamp}"
    count = 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{stamp}-{count}"
    return folder


def check_free(folder: Path) -> None:
    """Raise ``ConfigError`` if the folder holds more files than a failed start leaves, or can't be written."""
    check_unicode(str(folder.absolute()), f"--folder {folder}")
    check_writable(folder)
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"--folder {folder}: {path} is a link to {path.readlink()}, which does not exist")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--folder {folder}: a file is in the way")
    if folder.exists() and {path.name for path in folder.iterdir()} - LEFT_BY_A_FAILED_START:
        is_run = (folder / "recipe.yaml").exists()
        advice = f"To continue that run: whet resume {folder}" if is_run else "It is not a run: name another folder"
        raise ConfigError(f"--folder {folder}: it exists and is not empty. {advice}")


def create(folder: Path) -> None:
    """Make the folder. Raises ``ConfigError`` if it is not free or can't be made."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: it can't be made: {error.strerror}") from error


def check_resumable(folder: Path) -> None:
    """Raise ``ConfigError`` if the run can't be continued: its folders can't be written, something else has the name of
    one of its files, or its checkpoints are gone, so that it would begin again and drop its metrics."""
    for each in (folder, folder / "checkpoints", folder / "rollouts"):
        check_writable(each)
    for path in (folder / name for name in FILES_OF_A_RUN):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, where the run has a file: move it away, then resume")
    if (folder / "rollouts").is_file():
        raise ConfigError(f"{folder / 'rollouts'} is a file, where the run has a folder: move it away, then resume")
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    if not metrics.is_file() or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return
    with metrics.open("rb") as lines:
        saves = sum(b'"time/checkpoint"' in line for line in lines)
    if checkpoints.is_dir() and _saves_in_background(folder):
        saves -= 1  # the last one may have failed, for example on a full disk, after its step was logged
    if saves > 0:
        what = "is empty" if checkpoints.is_dir() else "is not a folder"
        raise ConfigError(
            f"{checkpoints} {what}, but {metrics} says that the run has saved checkpoints. Put them back, or begin "
            f"again elsewhere: whet train {shlex.quote(str(folder / 'recipe.yaml'))}"
        )


def _saves_in_background(folder: Path) -> bool:
    try:
        recipe = parse_mapping((folder / "recipe.yaml").read_text("utf-8", "replace"), "recipe.yaml")
    except (OSError, RecipeError):
        return False
    checkpoints = recipe.get("checkpoints")
    return isinstance(checkpoints, dict) and checkpoints.get("asynchronous") is True


def is_url(run: str) -> bool:
    """Return whether a run is given by the URL of its mirror."""
    return "://" in run


def from_mirror(url: str, folder: Path | None = None) -> Path:
    """Download the newest copy of a run, by default into ``runs/`` with the name of its mirror. Return the folder."""
    from whet.checkpoint.mirror import restore

    try:
        check_no_password(url, PASSWORD)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    folder = folder or Path("runs") / url.rstrip("/").rpartition("/")[2]
    check_free(folder)
    print(f"downloading {url} into {folder}", flush=True)
    print(f"the copy of step {restore(url, folder)} is intact", flush=True)
    return folder


def check_steps(folder: Path, recipe: "Recipe", done: int) -> None:
    """Raise ``ConfigError`` if a run has done more steps than its recipe has. Warns if all are done."""
    if done > recipe.steps:
        raise ConfigError(f"{folder} has done {done} steps already, more than the {recipe.duration} of its recipe")
    if done == recipe.steps:
        longer = f"steps={2 * done}" if recipe.epochs is None else f"epochs={2 * recipe.epochs:g}"
        more = f"whet resume {shlex.quote(str(folder))} {longer}"
        log.warning("step %d, the last one, is done; to train for longer: %s", done, more)


class Place:
    """A run's folder as it was when the run began."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._identity, self._lock = folder, _identity(folder), _identity(folder / LOCK)

    def check(self) -> None:
        """Raise ``WhetError`` if the folder was moved, removed or replaced since, or emptied but for new files, or if
        its lock was removed and another process uses it."""
        if _identity(self.folder) != self._identity or not (self.folder / "recipe.yaml").is_file():
            raise WhetError(
                f"the run folder {self.folder} was moved, removed or replaced during the run, so nothing more is "
                "written there. Resume it at its new place: whet resume FOLDER"
            )
        if _identity(self.folder / LOCK) != self._lock and is_locked(self.folder):
            raise WhetError(
                f"{self.folder / LOCK} was removed during the run, and another process uses the run folder now, so "
                "this one ends"
            )


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
