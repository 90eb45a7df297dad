"""Task folders in Harbor's layout (https://www.harborframework.com/docs/tasks), in the runtime ``local``.

    instruction.md            the prompt
    task.toml                 [verifier] timeout_sec
    environment/              the files of the work folder, and a Dockerfile of FROM, WORKDIR and COPY . .
    tests/test.sh             writes the reward to /logs/verifier/reward.txt or reward.json
    solution/solve.sh         a right solution

The tests never meet a process of the policy: its runtime is closed, and the work folder alone is carried to a new one,
into which the tests are then written. They start in ``/tests``, with ``HOME`` elsewhere than the work folder.
"""

import io
import json
import math
import re
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import DataError
from whet.core.types import Message, Task
from whet.shells.places import LOGS, TESTS, WORK
from whet.shells.runtime import FileProblem, Runtime, RuntimeFailure
from whet.tasks.cases import Answer
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.shell.base import TasksInShell, prepared
from whet.tasks.splits import checked_split
from whet.tasks.tools.base import solution

_CHECK = f"mkdir -p {LOGS}/verifier; export HOME=/tmp PYTHONNOUSERSITE=1; exec bash {TESTS}/test.sh"
_TIMEOUT_S = 600.0  # of tests whose task.toml names none
_REFUSED = ("environment.docker_image", "environment.gpus", "verifier.env", "verifier.user", "steps")  # of task.toml


@dataclass(frozen=True, slots=True)
class Folder:
    """A task folder."""

    folder: str  # absolute
    work: str  # the work folder in the runtime
    seconds: float  # of the tests


class TaskFolders(TasksInShell[Folder]):
    """Task folders in Harbor's layout; see ``docs/shells.md``."""

    named_scores = CORRECT | {"no_reward": NamedScore()}

    path: str
    """A folder of task folders."""
    test_path: str | None = None
    """Another, of test tasks."""

    def tasks(self, split: str) -> Sequence[Task[Folder]]:
        """Return the tasks in the order of their names. Raises ``DataError`` for a folder that can't be run."""
        path = self.path if checked_split(split) == "train" else self.test_path
        if path is None:
            return []
        folders = sorted(file.parent for file in Path(path).glob("*/instruction.md"))
        if not folders:
            raise DataError(f"{path} has no task folders: folders with instruction.md, task.toml and tests/test.sh")
        return [_task(folder, split, self.system) for folder in folders]

    def files(self, task: Task[Folder]) -> bytes:
        return _archive(Path(task.data.folder) / "environment")

    def work(self, task: Task[Folder]) -> str:
        return task.data.work

    def gold(self, task: Task[Folder]) -> Answer | None:
        script = Path(task.data.folder) / "solution/solve.sh"
        return solution(("bash", {"command": script.read_text()}), answer="done") if script.exists() else None

    def graded(self, task: Task[Folder], archive: bytes) -> dict[str, float]:
        """Run the tests on the work folder in a new runtime. Return the reward that they write; 0 if they write none,
        which the score ``no_reward`` counts."""
        fresh = prepared(self.runtime, archive, task.data.work)
        try:
            tests = Path(task.data.folder) / "tests"
            _write_tests(fresh, {str(file.relative_to(tests)): file for file in tests.rglob("*") if file.is_file()})
            fresh.run(_CHECK, task.data.seconds, TESTS)
            return _scores(_reward(fresh))
        finally:
            fresh.close()

    def unreadable(self) -> dict[str, float]:
        return _scores(None)


def _write_tests(runtime: Runtime, files: Mapping[str, Path]) -> None:
    """Write files into the folder of tests. Raises ``RuntimeFailure``: it is not the policy's fault."""
    try:
        for name, file in sorted(files.items()):
            runtime.write(f"{TESTS}/{name}", file.read_bytes())
    except FileProblem as problem:
        raise RuntimeFailure(f"the tests can't be written: {problem}") from None


def _scores(reward: float | None) -> dict[str, float]:
    right = reward is not None and reward >= 1
    return {"reward": reward or 0.0, "correct": float(right), "no_reward": float(reward is None)}


def _reward(runtime: Runtime) -> float | None:
    """Return the number in the file that tests write; None without a valid one."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = runtime.read(f"{LOGS}/verifier/{name}", 10_000).decode()
            number = float(text) if name == "reward.txt" else float(json.loads(text)["reward"])
        except (FileProblem, ValueError, KeyError, TypeError):
            continue
        return number if math.isfinite(number) else None
    return None


def _task(folder: Path, split: str, system: str | None) -> Task[Folder]:
    """Return the task of a folder. Raises ``DataError`` naming what the runtime can't do."""
    for name in ("task.toml", "tests/test.sh"):
        if not (folder / name).exists():
            raise DataError(f"{folder} has no {name}")
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        seconds = float(settings.get("verifier", {}).get("timeout_sec", _TIMEOUT_S))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}/task.toml: {error}") from None
    for name in _REFUSED:
        value: Any = settings
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            raise DataError(f"{folder}/task.toml: {name} can't be followed by the runtime local; remove it")
    work = _work_folder(folder / "environment")
    first = system or f"Do the task in the folder {work} with the tools. When it is done, answer: done"
    prompt: list[Message] = [
        {"role": "system", "content": first},
        {"role": "user", "content": (folder / "instruction.md").read_text().strip()},
    ]
    return Task(f"folders/{split}/{folder.name}", prompt, Folder(str(folder.absolute()), work, seconds))


def _work_folder(environment: Path) -> str:
    """Return the work folder that the Dockerfile names. Raises ``DataError`` for other instructions: the programs are
    the programs of this machine."""
    if any(environment.glob("docker-compose*")):
        raise DataError(f"{environment}: docker-compose can't be followed by the runtime local")
    work, dockerfile = WORK, environment / "Dockerfile"
    lines = dockerfile.read_text().splitlines() if dockerfile.exists() else []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#") or words[0].upper() == "FROM":
            continue
        if words[0].upper() == "WORKDIR" and re.fullmatch(r"/(app|work|workspace|repo|testbed)/?", words[-1]):
            work = words[-1].rstrip("/")
        elif words[0].upper() != "COPY" or words[1:] not in (["."] * 2, [".", work], [".", f"{work}/"]):
            raise DataError(
                f"{dockerfile}:{number}: {line.strip()!r} can't be followed by the runtime local, which has the "
                "programs of this machine; it reads FROM, COPY . . and WORKDIR /app, /work, /workspace, /repo, /testbed"
            )
    return work


def _archive(environment: Path) -> bytes:
    """Return the files of the work folder as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(environment.glob("*")):
            if path.name != "Dockerfile":
                tar.add(path, path.name)
    return buffer.getvalue()
