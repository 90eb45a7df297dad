"""A command as the program of an episode: any executable that calls the model at the URL in its environment.

{prompt} in a word    the text of the task's last message
standard input        the messages of the task, as JSON
environment           OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
working folder        a temporary one: the files of the task, a copy of ``folder``, or empty
standard output       the answer, unless the working folder is graded

It runs on the machine, or in a runtime of shells, where a link leads to the URL and to nothing else.
"""

import asyncio
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from whet.base.errors import CallError
from whet.base.scratch import Scratch
from whet.core.content import text_of
from whet.core.types import Task
from whet.processes.keeper import under_keeper
from whet.processes.sentinel_process import OWNER, kill_marked
from whet.processes.threads import run_in_thread
from whet.shells.links import LINK_PORT
from whet.shells.runtime import Runtime
from whet.tasks.work_folder import unpack

T = TypeVar("T")
log = logging.getLogger(__name__)

_MARK = "WHET_EPISODE"  # the variable by which all processes of an episode are found
_KEEPER_S = 30.0  # seconds in which a keeper ends, on a busy machine
_SHOWN = 2000  # bytes of each output in the error of a failed command
_LONGEST = 2**20  # bytes of an answer
_INSIDE = "/tmp/whet-agent"  # the names, without their ends, of what a command in a runtime is started with


@dataclass(frozen=True)
class Command:
    """The words of a command, further variables of its environment, and the folder that it starts with."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None = None

    async def solve(self, task: Task, base_url: str, api_key: str) -> str:
        """Return the standard output. All processes of the command are killed at its end, also if it is cancelled.
        Raises ``CallError`` if it fails."""
        with Scratch("agent") as scratch:
            place = scratch / "work"
            if self.folder is None:
                place.mkdir()
            else:
                await run_in_thread(partial(shutil.copytree, self.folder, place, symlinks=True), "whet-agent")
            return await self._run(scratch, task, base_url, api_key)

    async def work(
        self, task: Task, base_url: str, api_key: str, files: bytes, graded: Callable[[Path], Awaitable[T]]
    ) -> T:
        """Run the command in a folder with the files of an archive. Return what ``graded`` returns for the folder,
        after all of its processes were killed. Raises ``CallError`` if it fails."""
        with Scratch("agent") as scratch:
            place = scratch / "work"
            await run_in_thread(partial(unpack, files, place), "whet-agent")
            await self._run(scratch, task, base_url, api_key)
            return await graded(place)

    def work_inside(self, runtime: Runtime, task: Task, base_url: str, api_key: str, seconds: float) -> None:
        """Run the command in the work folder of a runtime with a link to ``base_url``, for at most ``seconds``. Blocks.
        Raises ``CallError`` if it fails or takes longer."""
        url = urlsplit(base_url)._replace(scheme="http", netloc=f"127.0.0.1:{LINK_PORT}").geturl()
        variables = {"HOME": "/tmp"} | _addresses(url, api_key) | dict(self.environment)  # the work folder is graded
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        start = f"exec {shlex.join(self._filled(task))} < {_INSIDE}.json"
        runtime.write(f"{_INSIDE}.json", json.dumps(task.prompt).encode())
        runtime.write(f"{_INSIDE}.sh", "\n".join([*exports, start]).encode("utf-8", "surrogateescape"))
        ended = runtime.run(f". {_INSIDE}.sh", seconds)
        limits, name = runtime.limits, self.words[0]
        if ended.ending == "time":
            raise CallError(f"{name} took more than {seconds:g} s for {task.uid}")
        if ended.ending == "memory":
            raise CallError(
                f"{name} was killed for {task.uid}: its processes used more than runtime.limits.memory_mib = "
                f"{limits.memory_mib}"
            )
        if ended.status:
            text = ended.output.decode("utf-8", "replace").strip()
            printed = f"; its output ends: {text[-_SHOWN:]}" if text else "; it printed nothing"
            raise CallError(f"{name} {_how(ended.status)} for {task.uid}{printed}")

    async def _run(self, scratch: Path, task: Task, base_url: str, api_key: str) -> str:
        """Return the standard output of the command in the folder ``work`` of ``scratch``."""
        place, mark = scratch / "work", secrets.token_hex(16)
        given, out, err = (scratch / name for name in ("messages.json", "out", "err"))
        given.write_text(json.dumps(task.prompt))
        with given.open("rb") as stdin, out.open("wb") as stdout, err.open("wb") as stderr:
            marks = {_MARK: mark, OWNER: str(os.getpid())}
            process = subprocess.Popen(  # asyncio's could be cancelled while it starts, and would then never end
                under_keeper(self._filled(task), str(place), **marks),
                env=self._environment(base_url, api_key),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            status = await run_in_thread(process.wait, "whet-agent")
        except asyncio.CancelledError:
            log.info("the command of %s was ended early%s", task.uid, _outputs(out, err))
            raise
        finally:
            process.terminate()  # the keeper kills all processes below it
            with suppress(subprocess.TimeoutExpired):
                await run_in_thread(partial(process.wait, _KEEPER_S), "whet-agent")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await run_in_thread(partial(kill_marked, _MARK, mark, scratch.resolve()), "whet-agent")
            await run_in_thread(process.wait, "whet-agent")
        if status:
            raise CallError(f"{self.words[0]} {_how(status)} for {task.uid}{_outputs(out, err)}")
        if out.stat().st_size > _LONGEST:
            raise CallError(f"{self.words[0]} printed more than {_LONGEST:,} bytes as its answer for {task.uid}")
        return out.read_bytes().decode(errors="replace").rstrip("\n")

    def _filled(self, task: Task) -> list[str]:
        """Return the words with the prompt of the task in place."""
        prompt = text_of(task.prompt[-1]["content"])
        return [word.replace("{prompt}", prompt) for word in self.words]

    def _environment(self, base_url: str, api_key: str) -> dict[str, str]:
        rest = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"}  # precedes the key
        return rest | _addresses(base_url, api_key) | dict(self.environment)


def _addresses(base_url: str, api_key: str) -> dict[str, str]:
    """Return the variables by which clients find the model."""
    urls = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    return urls | {"OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _outputs(out: Path, err: Path) -> str:
    """Return the ends of both outputs, for a message."""
    named = {"standard output": out, "standard error": err}
    ends = {name: _end(path).decode(errors="replace").strip() for name, path in named.items()}
    return "".join(f"; its {name} ends: {text}" for name, text in ends.items() if text) or "; it printed nothing"


def _end(path: Path) -> bytes:
    with path.open("rb") as file:  # of any length
        file.seek(max(0, path.stat().st_size - _SHOWN))
        return file.read(_SHOWN)
