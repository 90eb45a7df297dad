"""The images of task folders, for runtimes in containers: one that exists, or one that is built from a Dockerfile.

    docker_image    the image of this name, which is on this machine
    Dockerfile      whet-task:HASH, where HASH is of the files next to it: built once, kept by the engine

A work folder is in memory and lies over the image's, so an episode begins with a copy of the image's files.
"""

import hashlib
import os
import re
import shlex
from functools import lru_cache
from pathlib import Path

from whet.base.errors import ConfigError, DataError
from whet.shells.container import Container
from whet.shells.engine import Engine, EngineProblem

_COPY = "/whet-copy"  # a work folder that no image has
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr", "var"}
_SYSTEM |= {"logs", "tests", "tmp", "whet-copy", "whet-link"}


def image_of(environment: Path, named: object) -> str:
    """Return the name of a task's image. Raises ``DataError`` for a task without one."""
    if named:
        return str(named)
    if not (environment / "Dockerfile").exists():
        raise DataError(
            f"{environment}: the task has no image: neither a Dockerfile nor environment.docker_image in task.toml. "
            "Add it, or set runtime.image, the image of all tasks"
        )
    digest = hashlib.sha256()
    for path in sorted(environment.rglob("*")):
        facts = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        digest.update(repr((str(path.relative_to(environment)), facts.st_mode, len(content))).encode() + content)
    return f"whet-task:{digest.hexdigest()[:32]}"


def read_text(path: Path) -> str:
    """Return the text of a file of a task. Raises ``DataError`` naming a file that can't be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text: {error}") from None


def work_folder_of(environment: Path, given: object) -> str:
    """Return the work folder in the image: the one that task.toml gives, or the last ``WORKDIR`` of the Dockerfile.
    Raises ``DataError`` without an absolute one outside of the system's folders."""
    dockerfile = environment / "Dockerfile"
    lines = read_text(dockerfile).splitlines() if dockerfile.exists() else []
    named = [line.split()[-1] for line in lines if re.match(r"\s*WORKDIR\s+\S+\s*$", line, re.IGNORECASE)]
    work = str(given or (named or [""])[-1]).rstrip("/")
    if not re.fullmatch(r"(/[\w.-]+)+", work, re.ASCII) or ".." in work or work.split("/")[1] in _SYSTEM:
        problem = f"the work folder {work} can't be used" if work else "no work folder is named"
        raise DataError(
            f'{environment}: {problem}. Name it in task.toml, as in environment.workdir = "/app": an absolute path '
            "outside of the folders of the system"
        )
    return work


def provide(kind: Container, environment: Path, seconds: float) -> None:
    """Build the image of a task, for at most ``seconds``, if it is built from a Dockerfile and not there yet. Raises
    ``ConfigError``."""
    engine, image = Engine(kind.command), str(kind.image)
    if not image.startswith("whet-task:"):
        return
    try:
        engine.ask("image", "inspect", "--format", "{{.Id}}", image)
    except EngineProblem:
        try:
            engine.ask("build", "--quiet", "--tag", image, str(environment), seconds=seconds)
        except EngineProblem as problem:
            raise ConfigError(f"{environment}/Dockerfile: the image can't be built: {problem}") from None


@lru_cache(maxsize=64)
def files_in(kind: Container, work: str) -> bytes:
    """Return the files in the work folder of an image, as a tar archive. Raises ``ConfigError`` for files that can't
    be read, or are too large, and ``RuntimeFailure``."""
    runtime = kind.open(_COPY)
    try:
        ended = runtime.run(f"cp -RP -- {shlex.quote(work)}/. {_COPY}")
        if ended.status:
            text = ended.output.decode("utf-8", "replace")
            raise ConfigError(f"{kind.image}: the files in {work} can't be copied into memory: {text}")
        return runtime.snapshot()
    finally:
        runtime.close()
