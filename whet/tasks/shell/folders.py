"""Task folders in Harbor's layout (https://www.harborframework.com/docs/tasks). In containers without
``runtime.image`` each task has its image (``images.py``); elsewhere there are no images:

    instruction.md            the prompt
    task.toml                 [verifier] timeout_sec, [environment] workdir
    environment/              the files of the work folder, and a Dockerfile of FROM, WORKDIR and COPY . .
    tests/test.sh             writes the reward to /logs/verifier/reward.json or reward.txt
    solution/solve.sh         a right solution

The tests never meet a process of the policy: its runtime is closed, and the work folder alone is carried to a new one,
into which the tests are then written. They start in ``/tests``, or in the work folder as Harbor's do, with ``HOME``
elsewhere than the work folder. Settings and rewards are read as Harbor 0.26 does.
"""

import io
import json
import math
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.core.types import Message, Task
from whet.shells.container import Container
from whet.shells.places import LOGS, TESTS, WORK
from whet.shells.runtime import FileProblem, Runtime, RuntimeFailure, RuntimeKind
from whet.tasks.base import Environments
from whet.tasks.cases import Answer
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.shell.base import TasksInShell, prepared
from whet.tasks.shell.images import files_in, image_of, provide, read_text, work_folder_of
from whet.tasks.splits import checked_split
from whet.tasks.tools.base import solution

_CHECK = f"mkdir -p {LOGS}/verifier; export HOME=/tmp PYTHONNOUSERSITE=1; exec {TESTS}/test.sh"
_TIMEOUT_S = 600.0  # of tests and builds whose task.toml names none
_MOST_S = 1e9  # beyond what a system can wait for
_NEEDED = "it needs its image, which the runtime container uses where runtime.image is left out"
_WORK_FOLDERS = re.compile("/(app|work|workspace|repo|testbed)/?")
_REFUSED = (  # settings of task.toml that whet would otherwise ignore
    *("environment.gpus", "environment.tpu", "environment.env", "environment.healthcheck"),
    *("environment.mcp_servers", "environment.skills_dir"),
    *("verifier.env", "verifier.user", "verifier.environment", "verifier.collect", "agent.user", "solution.env"),
    "steps",
)
_ONLY = {  # settings of which some values can be followed
    "environment.os": ("linux",),
    "verifier.environment_mode": ("shared",),
    **dict.fromkeys(("environment.network_mode", "agent.network_mode"), ("public", "no-network")),
    "verifier.network_mode": ("public", "no-network"),
}


@dataclass(frozen=True, slots=True)
class Folder:
    """A task folder."""

    folder: str  # absolute
    work: str  # the work folder in the runtime
    copied: bool  # the work folder has the files of environment/
    seconds: float  # of the tests
    image: str | None  # the name of its image, if the task runs in it
    build_seconds: float  # in which the image is built


class TaskFolders(TasksInShell[Folder]):
    """Task folders in Harbor's layout; see ``docs/shells.md``."""

    named_scores = CORRECT | {"no_reward": NamedScore()}

    path: str
    """A folder of task folders."""
    test_path: str | None = None
    """Another, of test tasks."""
    tests_in_work_folder: bool = False
    """Start tests in the work folder, as Harbor does; off: in the folder of tests, where no file of the policy can take
    the place of a module or program that a test starts."""

    def tasks(self, split: str) -> Sequence[Task[Folder]]:
        """Return the tasks in the order of their names. Raises ``DataError`` for a folder that can't be run."""
        path = self.path if checked_split(split) == "train" else self.test_path
        if path is None:
            return []
        files = (file for name in ("instruction.md", "task.toml") for file in Path(path).glob(f"*/{name}"))
        folders = sorted({file.parent for file in files})
        if not folders:
            raise DataError(f"{path} has no task folders: folders with instruction.md, task.toml and tests/test.sh")
        own_image = isinstance(self.runtime, Container) and self.runtime.image is None
        return [_task(folder, split, self.system, own_image) for folder in folders]

    def open(self) -> Environments[Folder]:
        environments = super().open()
        for task in (task for split in ("train", "test") for task in self.tasks(split)):
            if task.data.image:
                self.files(task)  # raises for files that an episode can't begin with
        return environments

    def runtime_of(self, task: Task[Folder]) -> RuntimeKind:
        return self.runtime.model_copy(update={"image": task.data.image}) if task.data.image else self.runtime

    def runtimes(self) -> Sequence[RuntimeKind]:
        """Return the different runtimes of the tasks, after their images were built."""
        kinds = dict[str | None, RuntimeKind]()
        for task in (task for split in ("train", "test") for task in self.tasks(split)):
            kind = kinds.setdefault(task.data.image, self.runtime_of(task))
            if isinstance(kind, Container) and task.data.image:
                provide(kind, Path(task.data.folder) / "environment", task.data.build_seconds)
        return list(kinds.values()) or [self.runtime]

    def files(self, task: Task[Folder]) -> bytes:
        kind = self.runtime_of(task)
        if isinstance(kind, Container) and task.data.image:
            return files_in(kind, task.data.work)
        return _archive(Path(task.data.folder) / "environment", task.data.copied)

    def work(self, task: Task[Folder]) -> str:
        return task.data.work

    def gold(self, task: Task[Folder]) -> Answer | None:
        script = Path(task.data.folder) / "solution/solve.sh"
        return solution(("bash", {"command": read_text(script)}), answer="done") if script.exists() else None

    def graded(self, task: Task[Folder], archive: bytes) -> dict[str, float]:
        """Run the tests on the work folder in a new runtime. Return the reward that they write; 0 if they write none,
        which the score ``no_reward`` counts."""
        fresh = prepared(self.runtime_of(task), archive, task.data.work)
        try:
            tests = Path(task.data.folder) / "tests"
            _write_tests(fresh, {str(file.relative_to(tests)): file for file in tests.rglob("*") if file.is_file()})
            fresh.run(_CHECK, task.data.seconds, task.data.work if self.tests_in_work_folder else TESTS)
            return _scores(_reward(fresh))
        finally:
            fresh.close()

    def unreadable(self) -> dict[str, float]:
        return _scores(None)


def _write_tests(runtime: Runtime, files: Mapping[str, Path]) -> None:
    """Write files into the folder of tests, with their right to be executed. Raises ``RuntimeFailure``: it is not the
    policy's fault."""
    try:
        for name, file in sorted(files.items()):
            runtime.write(f"{TESTS}/{name}", file.read_bytes())
        programs = [name for name, file in files.items() if name == "test.sh" or os.access(file, os.X_OK)]
        ended = runtime.run(f"chmod +x -- {shlex.join(programs)}", folder=TESTS)
        if ended.status:
            raise RuntimeFailure(f"the tests can't be made executable: {ended.output.decode('utf-8', 'replace')}")
    except FileProblem as problem:
        raise RuntimeFailure(f"the tests can't be written: {problem}") from None


def _scores(reward: float | None) -> dict[str, float]:
    right = reward is not None and reward >= 1
    return {"reward": reward or 0.0, "correct": float(right), "no_reward": float(reward is None)}


def _reward(runtime: Runtime) -> float | None:
    """Return the reward in the file that tests write, of which reward.json counts if both are there; None without a
    valid reward. All values of reward.json must be numbers."""
    for name in ("reward.json", "reward.txt"):
        try:
            text = runtime.read(f"{LOGS}/verifier/{name}", 10_000).decode()
        except FileProblem:
            continue
        except ValueError:
            return None
        try:
            values: Any = json.loads(text) if name == "reward.json" else {"reward": float(text)}
            right = all(isinstance(value, int | float) and math.isfinite(value) for value in values.values())
            return float(values["reward"]) if right else None
        except (ValueError, KeyError, AttributeError, OverflowError, RecursionError):
            return None
    return None


def _task(folder: Path, split: str, system: str | None, own_image: bool) -> Task[Folder]:
    """Return the task of a folder. Raises ``DataError`` naming what the runtime can't do."""
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).exists():
            raise DataError(f"{folder} has no {name}")
    if (folder / "trajectory.json").exists():
        raise DataError(f"{folder}/trajectory.json: whet begins no task in the middle of an episode; remove it")
    instruction = read_text(folder / "instruction.md").strip()
    if not instruction:
        raise DataError(f"{folder}/instruction.md is empty; it is the prompt of the task")
    try:
        settings = tomllib.loads(read_text(folder / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{folder}/task.toml: {error}") from None
    for name in ("agent", "environment", "solution", "verifier"):
        if not isinstance(settings.get(name, {}), dict):
            raise DataError(f"{folder}/task.toml: {name} = {settings[name]!r} is not a table; write [{name}]")
    seconds, build_seconds = (
        _seconds(folder, settings, name) for name in ("verifier.timeout_sec", "environment.build_timeout_sec")
    )
    for name in _REFUSED:
        if _setting(settings, name):
            raise DataError(f"{folder}/task.toml: {name} can't be followed; remove it")
    if _setting(settings, "environment.docker_image") and not own_image:
        raise DataError(f"{folder}/task.toml: environment.docker_image can't be followed: {_NEEDED}; or remove it")
    for name, values in _ONLY.items():
        value = _setting(settings, name)
        if value is not None and str(value).lower() not in values:
            raise DataError(f"{folder}/task.toml: {name} = {value} can't be followed, only {' and '.join(values)}")
    environment, given, image = folder / "environment", _setting(settings, "environment.workdir"), None
    if any(environment.glob("docker-compose*")):
        raise DataError(f"{environment}: docker-compose can't be followed")
    if own_image:
        image = image_of(environment, _setting(settings, "environment.docker_image"))
        work, copied = work_folder_of(environment, given), True
    else:
        work, copied = _work_folder(environment, given)
    first = system or f"Do the task in the folder {work} with the tools. When it is done, answer: done"
    data = Folder(str(folder.absolute()), work, copied, seconds, image, build_seconds)
    prompt: list[Message] = [
        {"role": "system", "content": first},
        {"role": "user", "content": instruction},
    ]
    return Task(f"folders/{split}/{folder.name}", prompt, data)


def _seconds(folder: Path, settings: Mapping[str, Any], name: str) -> float:
    value = _setting(settings, name)
    if value is None:
        return _TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_S:
        raise DataError(f"{folder}/task.toml: {name} = {value!r} is not a valid number of seconds")
    return float(value)


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    """Return a value of task.toml by its dotted name; None if it is not there."""
    value: Any = settings
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _work_folder(environment: Path, given: object) -> tuple[str, bool]:
    """Return the work folder of a task without its image: the one that is ``given`` or that the Dockerfile names; and
    whether files are copied to it, as they are without a Dockerfile. Raises ``DataError`` for other instructions: the
    programs are the programs of the runtime."""
    if (environment / ".dockerignore").exists():
        raise DataError(f"{environment}: .dockerignore can't be followed: {_NEEDED}; or remove it")
    work, dockerfile = WORK, environment / "Dockerfile"
    copied = not dockerfile.exists()
    lines = read_text(dockerfile).splitlines() if dockerfile.exists() else []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#") or words[0].upper() == "FROM":
            continue
        if words[0].upper() == "WORKDIR" and _WORK_FOLDERS.fullmatch(words[-1]) and not copied:
            work = words[-1].rstrip("/")
        elif words[0].upper() == "COPY" and words[1:] in (["."] * 2, [".", work], [".", f"{work}/"]):
            copied = True
        else:
            raise DataError(
                f"{dockerfile}:{number}: {line.strip()!r} can't be followed: {_NEEDED}. Without "
                "it, a Dockerfile has FROM, then WORKDIR /app, /work, /workspace, /repo or /testbed, then COPY . ."
            )
    if given is None:
        return work, copied
    if not _WORK_FOLDERS.fullmatch(str(given)) or (copied and dockerfile.exists() and str(given).rstrip("/") != work):
        raise DataError(
            f"{environment.parent}/task.toml: environment.workdir = {given} can't be followed; it may be /app, /work, "
            "/workspace, /repo or /testbed, and must be the folder to which the Dockerfile copies files"
        )
    return str(given).rstrip("/"), copied


def _archive(environment: Path, copied: bool) -> bytes:
    """Return the files of the work folder as a tar archive, without any if they are not ``copied``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(environment.glob("*")) if copied else ():
            if path.name != "Dockerfile":
                tar.add(path, path.name)
    return buffer.getvalue()
