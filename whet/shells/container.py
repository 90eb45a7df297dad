"""A runtime in a container of Docker or Podman, driven by the engine's command line.

    owner ── docker run --interactive ── process 1, as root: reads a word, kills all other processes, answers with it
         └── docker exec for each request ── bash as another user, which can't reach process 1

The root folder is read-only; the folders of a runtime are in memory. Process 1 ends when its input does, so the
container ends with its owner, and ``--rm`` removes it. Who waits for whom: every answer of the engine has a deadline.
"""

import os
import select
import subprocess
import tarfile
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from tempfile import TemporaryFile

from pydantic import Field

from whet.base.errors import ConfigError, WhetError
from whet.shells.archives import plain
from whet.shells.container_link import FOLDER, NO_RELAY, RELAYED, STARTED, listening
from whet.shells.engine import LABEL, Engine, EngineProblem, error_text, owner
from whet.shells.links import Link
from whet.shells.output import Output
from whet.shells.places import FILE_PROBLEM, LOGS, TESTS, WORK, Ending
from whet.shells.runtime import Ended, FileProblem, Runtime, RuntimeFailure, RuntimeKind

_USER = "10001:10001"
_START_S = 120.0  # seconds in which a container starts
_FILES_S = 60.0  # seconds for reading and writing, and for process 1 to kill the others
_CLIENT_S = 30.0  # seconds in which a command of the engine ends, once its output has
_STARTED = STARTED.encode()
# Podman begins a folder in memory with the image's files, which belong to root: the work folder is emptied first.
_CONTROL = """
shopt -s dotglob nullglob; rm -rf -- "$0"/*
while IFS= read -r word; do
  while kill -9 -1 2>/dev/null; do :; done
  killed=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [[ -r $file ]] && while read -r key value; do [[ $key == oom_kill ]] && killed=$value; done < "$file"
  done
  echo "$word $killed"
done
"""
# The word is the proof that the engine started bash: what a command writes goes to standard output. In the end every
# process of the user is killed, because the engine waits for all that hold the output.
_RUN = f"""
printf {STARTED} >&2
bash -c "$1" < /dev/null 2>&1
status=$?
kill -9 -1 2>/dev/null
exit $status
"""
_FILE = f"""
printf {STARTED} >&2
problem() {{ echo "$1" >&2; exit {FILE_PROBLEM}; }}
"""
_READ = _FILE + '[[ -e $1 ]] || problem "$1: No such file"; [[ -f $1 ]] || problem "$1: not a regular file"; '
_READ += 'head -c "$2" -- "$1" || exit 99'
_WRITE = _FILE + 'mkdir -p -- "$(dirname -- "$1")" || exit 99; '
_WRITE += '[[ ! -e $1 || -f $1 ]] || problem "$1: not a regular file"; cat > "$1" || exit 99'
_SNAPSHOT = _FILE + "tar --create --hard-dereference --format=pax . || exit 99"
_RESTORE = _FILE + "tar --extract --no-same-owner --file=- || exit 99"
_PROBE = "for program in cat head tar mkdir dirname; do type -P $program >/dev/null || echo $program; done"


class Container(RuntimeKind):
    """A container of an image that is on this machine; see ``docs/shells.md``."""

    image: str | None = None
    """The image. It needs bash, coreutils and GNU tar. None: the image of each task, for task folders."""
    command: str = "docker"
    """The engine's command line: docker, podman, or a path."""
    options: tuple[str, ...] = Field(default=())
    """Further arguments of ``docker run``, such as ``--runtime=runsc``."""

    def check(self) -> None:
        engine = Engine(self.command)
        try:
            engine.sweep()
        except EngineProblem as problem:
            raise ConfigError(
                f"runtime.command: containers can't be started ({problem}). Install and start Docker or Podman"
            ) from None
        if self.image is None:
            raise ConfigError("runtime.image: name an image; only task folders (data.type=task_folders) have images")
        try:
            engine.ask("image", "inspect", "--format", "{{.Id}}", self.image)
        except EngineProblem as problem:
            raise ConfigError(f"runtime.image: {problem}. Get it with: {self.command} pull {self.image}") from None
        try:
            runtime = self.open()
            try:
                missing = runtime.run(_PROBE).output.decode("utf-8", "replace").split()
                runtime.write("file", b"")
                runtime.snapshot()
            finally:
                runtime.close()
        except (WhetError, FileProblem) as problem:
            raise ConfigError(f"runtime.image: {self.image} runs no commands: {problem}") from None
        if missing:
            raise ConfigError(f"runtime.image: {self.image} lacks the programs {', '.join(missing)}")

    def open(self, work: str = WORK, link: Link | None = None) -> "ContainerRuntime":
        return ContainerRuntime(self, work, link)


class ContainerRuntime(Runtime):
    """The owner's side of one container."""

    def __init__(self, settings: Container, work: str = WORK, link: Link | None = None) -> None:
        self.limits, self.work, self._linked = settings.limits, work, link is not None
        self._engine, self._name = Engine(settings.command), f"whet-{uuid.uuid4().hex}"
        self._errors = TemporaryFile()  # noqa: SIM115 - it is closed with this object
        folders = [part for path in (work, "/tmp", TESTS, LOGS) for part in ("--tmpfs", self._mounted(path))]
        memory = f"{self.limits.memory_mib + self.limits.disk_mib}m"  # files in memory count, too
        unlink, volumes = (lambda: None), list[str]()
        if link is not None:
            unlink, place = listening(link)
            volumes = ["--volume", f"{place}:{FOLDER}:ro"]
        reader, writer = os.pipe()
        self._words = open(writer, "wb", buffering=0)  # noqa: SIM115 - closed at the end of the container
        try:
            self._process = self._engine.start(
                [
                    *("run", "--interactive", "--rm", "--pull=never", "--name", self._name),
                    *("--label", f"{LABEL}={owner()}", "--network=none", "--read-only", *folders, *volumes),
                    *("--user=0:0", "--cap-drop=ALL", "--cap-add=KILL", "--security-opt=no-new-privileges"),
                    *("--memory", memory, "--memory-swap", memory, f"--pids-limit={self.limits.processes + 2}"),
                    *("--ulimit=core=0:0", "--ulimit=nofile=1024:1024", *settings.options),
                    *("--entrypoint=bash", settings.image or "none", "-c", _CONTROL, work),
                ],
                reader,
                self._errors.fileno(),
            )
        except BaseException:
            unlink()
            raise
        finally:
            os.close(reader)
        self._end = weakref.finalize(self, _end, self._engine, self._name, self._process, self._words, unlink)
        self._killed_for_memory = 0
        try:
            self._end_commands(_START_S)
            if self._linked and self.run("true").status == NO_RELAY:
                raise RuntimeFailure("the image has no python3, which carries the connections of a link")
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float | None = None, folder: str = "") -> Ended:
        seconds = self.limits.deadline_s if seconds is None else seconds
        keep = self.limits.output_bytes
        script = RELAYED + _RUN if self._linked else _RUN
        status, output, _ = self._exec(script, (command,), b"", seconds, Output(keep, cut_middle=True), folder)
        ending: Ending = "time" if status is None else "exit"
        if self._end_commands(_FILES_S):
            ending = "memory"
        return Ended(_signalled(status), ending, output)

    def write(self, path: str, content: bytes) -> None:
        self._files(_WRITE, (path,), content)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        return self._files(_READ, (path, str(limit)), keep=limit)

    def snapshot(self) -> bytes:
        most = (self.limits.disk_mib << 20) * 2
        archive = self._files(_SNAPSHOT, keep=most + 1)
        if len(archive) > most:
            raise FileProblem(f"the files in the work folder are larger than {self.limits.disk_mib} MiB")
        return _plain(archive)

    def restore(self, archive: bytes) -> None:
        self._files(_RESTORE, content=_plain(archive))

    def close(self) -> None:
        self._end()

    def _mounted(self, path: str) -> str:
        return f"{path}:rw,exec,nosuid,nodev,mode=1777,size={self.limits.disk_mib}m"

    def _files(self, script: str, arguments: Sequence[str] = (), content: bytes = b"", keep: int = 1000) -> bytes:
        """Read or write. Raises ``FileProblem`` with what the program said."""
        if any("\0" in argument for argument in arguments):
            raise FileProblem("the path has a NUL character")
        status, output, problem = self._exec(script, arguments, content, _FILES_S, Output(keep, cut_middle=False), "")
        self._end_commands(_FILES_S)
        if status is None or (status and len(output) < keep):  # a longer output ends with a broken pipe
            raise FileProblem(problem or f"the file could not be read or written (status {status})")
        return output

    def _exec(
        self, script: str, arguments: Sequence[str], content: bytes, seconds: float, output: Output, folder: str
    ) -> tuple[int | None, bytes, str]:
        """Run a script in the container. Return its exit status, or None after ``seconds``, its output and its errors.
        Raises ``RuntimeFailure`` if it was not started."""
        variables = [part for pair in ("LANG=C.UTF-8", "USER=agent", f"HOME={self.work}") for part in ("--env", pair)]
        place = ["--user", _USER, "--workdir", folder or self.work]
        with TemporaryFile() as given, TemporaryFile() as errors:
            given.write(content)
            given.seek(0)
            called = ["exec", "--interactive", *place, *variables, self._name, "bash", "-c", script, "bash", *arguments]
            process = self._started(called, given.fileno(), errors.fileno())
            status = _collect(process, output, time.monotonic() + seconds)
            words = os.pread(errors.fileno(), 1000, 0)
            if status is not None and _STARTED not in words:
                raise RuntimeFailure(
                    f"the container of an episode failed: {error_text(errors.fileno())}{self._last_words()}"
                )
            return status, output.bytes(), words.partition(_STARTED)[2].decode("utf-8", "replace").strip()

    def _started(self, called: Sequence[str], given: int, errors: int) -> subprocess.Popen[bytes]:
        try:
            return self._engine.start(called, given, errors)
        except EngineProblem as problem:
            raise RuntimeFailure(f"a command could not be started: {problem}") from None

    def _end_commands(self, seconds: float) -> bool:
        """Have process 1 kill all others. Return whether the kernel killed one for its memory. Raises
        ``RuntimeFailure``."""
        word, reply, until = uuid.uuid4().hex.encode(), b"", time.monotonic() + seconds
        answers = self._process.stdout
        assert answers is not None
        try:
            self._words.write(word + b"\n")
            while not reply.endswith(b"\n"):
                if not select.select([answers], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise RuntimeFailure(f"the container of an episode gave no answer within {seconds:g} s")
                piece = os.read(answers.fileno(), 1000)
                if not piece:
                    raise OSError
                reply += piece
            proof, killed = reply.split()
            if proof != word:
                raise OSError
        except (OSError, ValueError):
            raise RuntimeFailure(f"the container of an episode ended{self._last_words()}") from None
        before, self._killed_for_memory = self._killed_for_memory, int(killed)
        return self._killed_for_memory > before

    def _last_words(self) -> str:
        words = os.pread(self._errors.fileno(), 1000, 0).decode("utf-8", "replace").strip()
        return f": {words}" if words else ""


def _collect(process: subprocess.Popen[bytes], output: Output, until: float) -> int | None:
    """Collect the output of a command of the engine. Return its status; None if it has not ended at ``until``."""
    assert process.stdout is not None
    late = False
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        while output.open and not late and (output.last or not output.left_out):
            left = until - time.monotonic()
            late = left <= 0 or not select.select([pipe], [], [], left)[0]
            output.take(pipe.fileno())
        if late:
            process.kill()  # only the client; process 1 kills the command
    try:
        status = process.wait(_CLIENT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status, late = process.wait(), True
    return None if late else status


def _plain(archive: bytes) -> bytes:
    try:
        return plain(archive)
    except (tarfile.TarError, RecursionError, ValueError, OSError) as error:
        raise FileProblem(f"{type(error).__name__}: {error}") from None


def _signalled(status: int | None) -> int:
    """Return the exit status as ``Ended`` has it; bash gives 128 plus the signal."""
    if status is None:
        return -9
    return 128 - status if 128 < status < 193 else status


def _end(
    engine: Engine, name: str, process: subprocess.Popen[bytes], words: FileIO, unlink: Callable[[], None]
) -> None:
    """End a container: process 1 reads the end of its input. Kill it where that takes too long."""
    unlink()
    with suppress(OSError):
        words.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        engine.end(name)
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
