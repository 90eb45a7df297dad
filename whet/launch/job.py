"""A job: the command that a profile runs elsewhere, and the record of it that stays in the run folder.

``RUN/launch/1`` holds the first launch of a run: ``job.json``, the script or manifest, the recipe, the difference of
each checkout to its commit, and the versions of all packages. A second launch, of ``whet resume``, is in ``launch/2``.
"""

import hashlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Self

import whet
from whet.base.errors import WhetError
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.config.typed import check_types
from whet.launch.profiles import Profile

FOLDER, RECORD, RECIPE, LOG, EXIT = "launch", "job.json", "recipe.yaml", "log.txt", "exit_code"
_GIT_DEADLINE = 20.0  # seconds
_LONGEST_NAME = 47


@dataclass(frozen=True, slots=True)
class Job:
    """A command with the place where it runs."""

    command: tuple[str, ...]  # the words after ``whet`` as the user wrote them, without the launch
    sent: tuple[str, ...]  # the words that the job runs
    run: Path  # absolute path of the run folder on this machine
    folder: Path  # of this launch, in the run folder
    working_folder: Path
    profile_name: str
    profile: Profile
    again: tuple[str, ...] = ()  # the words that it runs where the run has begun already
    recipe: str | None = None  # text of the recipe that is sent
    trains: bool = False  # it takes settings of a recipe, and can use several nodes
    saves: bool = False  # it takes ``checkpoints.before`` from the profile

    @property
    def name(self) -> str:
        """The name that schedulers show: letters, digits and dashes, at most 47, as KubeRay wants it. A longer one ends
        with a hash in place of its rest, so that runs whose names begin alike differ."""
        whole = f"whet-{self.run.name}-{self.folder.name}"
        plain = re.sub(r"[^a-z0-9]+", "-", whole.lower()).strip("-")
        if len(plain) <= _LONGEST_NAME:
            return plain
        digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return f"{plain[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"

    @property
    def line(self) -> str:
        """The command as it is typed."""
        return shlex.join(["whet", *self.command])


@dataclass(slots=True, eq=False)
class Record:
    """A launched job as its ``job.json`` describes it."""

    id: str  # that the scheduler gave
    kind: str
    profile_name: str
    profile: JsonObject
    command: list[str]
    name: str
    working_folder: str
    launched: float  # seconds since 1970
    commits: dict[str, str] = field(default_factory=dict)  # checkout -> commit
    extra: JsonObject = field(default_factory=dict)  # facts of a scheduler that tell its job from another one
    folder: Path = Path()

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def run(self) -> Path:
        return self.folder.parent.parent

    def exit_code(self) -> int | None:
        """Return the exit code that the job's script wrote at its end, if it did."""
        try:
            return int((self.folder / EXIT).read_text())
        except (OSError, ValueError):
            return None

    def write(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_atomically(self.folder / RECORD, json.dumps(values, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a launch. Raises ``WhetError`` if it is damaged."""
        try:
            values = json.loads((folder / RECORD).read_text())
            check_types(cls, values)
            return cls(**values, folder=folder)
        except (OSError, ValueError, TypeError) as error:
            raise WhetError(
                f"{folder / RECORD} can't be read: {error}; remove {folder} to forget this launch"
            ) from None


def launches(run: Path) -> list[Path]:
    """Return the folders of a run's launches, the oldest first."""
    return [folder for folder in _numbered(run) if (folder / RECORD).exists()]


def next_folder(run: Path) -> Path:
    """Return the folder of the next launch of a run. Nothing is created."""
    number = max((int(folder.name) for folder in _numbered(run)), default=0) + 1
    return run / FOLDER / str(number)


def _numbered(run: Path) -> list[Path]:
    """Return the folders of launches in their order; others, such as copies, are left out."""
    numbered = (path for path in run.glob(f"{FOLDER}/*") if path.name.isdecimal())
    return sorted(numbered, key=lambda path: int(path.name))


def keep(job: Job) -> dict[str, str]:
    """Write the recipe, the state of the code and the packages next to the job's script; return the commits."""
    if job.recipe is not None:
        write_atomically(job.folder / RECIPE, job.recipe)
    packages = {f"{package.name}=={package.version}" for package in distributions()}
    write_atomically(job.folder / "packages.txt", "\n".join(sorted(packages, key=str.lower)) + "\n")
    commits = {}
    for checkout, commit, difference in _checkouts(job.working_folder, Path(whet.__file__).parent):
        commits[str(checkout)] = commit
        alike = sum(Path(other).name == checkout.name for other in commits) - 1
        write_atomically(job.folder / f"{checkout.name}{f'-{alike + 1}' if alike else ''}.diff", difference)
    return commits


def record(job: Job, id: str, kind: str, commits: dict[str, str], extra: dict[str, object]) -> Record:
    """Write and return the record of a job that a scheduler took."""
    written = Record(
        id=id, kind=kind, profile_name=job.profile_name, profile=job.profile.model_dump(mode="json"),
        command=list(job.command), name=job.name, working_folder=str(job.working_folder), launched=time.time(),
        commits=commits, extra=extra, folder=job.folder,
    )  # fmt: skip
    written.write()
    return written


def _checkouts(*folders: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (checkout, commit, difference to it) of the git checkouts that hold the folders. Untracked files are named
    at the end of the difference."""
    seen = set()
    for folder in folders:
        top = _git(folder, "rev-parse", "--show-toplevel").strip()
        if not top or top in seen:
            continue
        seen.add(top)
        commit = _git(folder, "rev-parse", "HEAD").strip() or "no commit"
        difference = _git(Path(top), "diff", "HEAD")
        untracked = _git(Path(top), "ls-files", "--others", "--exclude-standard").splitlines()
        yield Path(top), commit, difference + "".join(f"# not tracked by git: {name}\n" for name in untracked)


def _git(folder: Path, *words: str) -> str:
    """Return what git prints, or nothing where git or a checkout is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, errors="replace", timeout=_GIT_DEADLINE
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
