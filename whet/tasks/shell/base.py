"""Bases of tasks that are solved in a shell: of any origin, and drawn from a seed with the files that must be in the
work folder at the end."""

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Self

from pydantic import model_validator

from whet.config import Component
from whet.core.types import D, Task
from whet.processes.threads import run_in_thread
from whet.shells.links import Link
from whet.shells.local import Local
from whet.shells.places import RUNTIMES, WORK
from whet.shells.runtime import FileProblem, Runtime, RuntimeKind
from whet.tasks.base import Environments
from whet.tasks.scores import CORRECT, NamedScore, NamedScores
from whet.tasks.shell.tools import Shell
from whet.tasks.tools.base import SeededToolTasks, ToolTasks, right_or_wrong

THREAD = "whet-shell"
_MOST_MEMBERS = 10_000

FILES_SCORES: NamedScores = CORRECT | {"shell_unreadable": NamedScore()}
"""Scores of files: 1 if they can't be read, or are too many."""


class TasksInShell(ToolTasks[D], Generic[D], ABC):
    """Tasks that are solved in a shell, by the tools of an episode or by an agent's command, and graded by the files
    that are in the work folder at the end. Subclasses define ``files`` and ``graded``."""

    runtime: Annotated[RuntimeKind, Component(RUNTIMES)] = Local()
    """The place where the commands run: ``{type: local, limits: {deadline_s: 10}}``."""
    editor: bool = False
    """Give the policy tools to view, create and change files, besides bash."""

    @model_validator(mode="after")
    def _tools_wait_for_commands(self) -> Self:
        if self.limits.deadline_s <= self.runtime.limits.deadline_s:
            raise ValueError(
                f"limits.deadline_s = {self.limits.deadline_s:g}, the longest time of a call, must be above "
                f"runtime.limits.deadline_s = {self.runtime.limits.deadline_s:g}, that of a command"
            )
        return self

    def open(self) -> Environments[D]:
        for kind in self.runtimes():
            kind.check()
        return super().open()

    def runtimes(self) -> Sequence[RuntimeKind]:
        """Return the different runtimes of the tasks."""
        return [self.runtime]

    def runtime_of(self, task: Task[D]) -> RuntimeKind:
        """Return the runtime of a task."""
        return self.runtime

    @abstractmethod
    def files(self, task: Task[D]) -> bytes:
        """Return the work folder at the beginning, as a tar archive."""

    @abstractmethod
    def graded(self, task: Task[D], archive: bytes) -> dict[str, float]:
        """Return the scores of the work folder at the end, with ``"reward"`` among them. Blocks. Raises ``FileProblem``
        for files that can't be carried or read, which earn the scores of ``unreadable``."""

    def unreadable(self) -> dict[str, float]:
        """Return the scores of a work folder with files that can't be read, or too many."""
        return right_or_wrong(False) | {"shell_unreadable": 1.0}

    def work(self, task: Task[D]) -> str:
        """Return the path of the work folder in the runtime."""
        return WORK

    async def state(self, task: Task[D], link: Link | None = None) -> Shell:
        def opened() -> Runtime:
            return prepared(self.runtime_of(task), self.files(task), self.work(task), link)

        return Shell(await run_in_thread(opened, THREAD), self.editor)

    async def score(self, task: Task[D], state: Shell, answer: str) -> dict[str, float]:
        """Return the scores of the files. The runtime is closed before they are graded."""

        def snapshot() -> bytes:
            archive = state.runtime.snapshot()
            state.runtime.close()
            return archive

        return await self.grade_folder(task, snapshot)

    async def grade_folder(self, task: Task[D], snapshot: Callable[[], bytes]) -> dict[str, float]:
        """Return the scores of the work folder that ``snapshot`` returns. It blocks, and may raise ``FileProblem``."""

        def scores() -> dict[str, float]:
            try:
                return self.graded(task, snapshot())
            except FileProblem:
                return self.unreadable()

        return await run_in_thread(scores, THREAD)

    async def end(self, state: Shell) -> None:
        await run_in_thread(state.runtime.close, THREAD)


@dataclass(frozen=True, slots=True)
class Files:
    """The texts of all files in the work folder, by their paths, and a command that makes the change."""

    before: dict[str, str]
    after: dict[str, str]
    command: str


class FileTasksInShell(TasksInShell[Files], SeededToolTasks[Files], ABC):
    """Tasks to change the files of the work folder. Subclasses define ``draw`` and ``gold``."""

    def files(self, task: Task[Files]) -> bytes:
        return archive_of(task.data.before)

    def graded(self, task: Task[Files], archive: bytes) -> dict[str, float]:
        """Return 1 if exactly the expected files are there, apart from white space at the ends of texts and lines."""
        right = _plain(_files_of(archive)) == _plain(task.data.after)
        return right_or_wrong(right) | {"shell_unreadable": 0.0}


def prepared(kind: RuntimeKind, archive: bytes, work: str = WORK, link: Link | None = None) -> Runtime:
    """Return a new runtime with the files of a tar archive."""
    runtime = kind.open(work, link)
    try:
        runtime.restore(archive)
    except BaseException:
        runtime.close()
        raise
    return runtime


def archive_of(files: Mapping[str, str]) -> bytes:
    """Return a tar archive of text files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content := text.encode()), 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _files_of(archive: bytes) -> dict[str, str]:
    """Return the texts of all regular files in an archive; of a link, a text that no file has. Raises
    ``FileProblem``."""
    files = dict[str, str]()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for number, member in enumerate(tar):
            if number > _MOST_MEMBERS:
                raise FileProblem(f"more than {_MOST_MEMBERS} files")
            if not member.isdir():
                opened = tar.extractfile(member) if member.isreg() else None
                text = opened.read().decode("utf-8", "replace") if opened else f"\0{member.linkname}"
                files[member.name.removeprefix("./")] = text
    return files


def _plain(files: Mapping[str, str]) -> dict[str, list[str]]:
    return {path: [line.rstrip() for line in text.rstrip().split("\n")] for path, text in files.items()}
