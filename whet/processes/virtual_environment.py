"""Virtual environments made from requirements, by ``uv`` if it is installed, else by ``venv`` and ``pip``. They are
kept in the cache, in a folder named by a hash of the requirements, the interpreter and whet's version.

Who waits for whom: one process makes a virtual environment, and others that need the same one wait for its lock until
their deadline. The installer inherits the lock, so it is free only when no part of a killed installation runs. The
file ``complete`` is written last; a folder without it is removed and made again.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

from whet import __version__
from whet.base.digests import sha256
from whet.base.errors import ConfigError, DeadlineError
from whet.base.files import error_context, write_atomically
from whet.fetch.download import cache_folder

log = logging.getLogger(__name__)

_OWN_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")  # options whose files have no hash here
_UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "Failed to fetch", "dns error")
_ASK_S = 60.0  # seconds for the start of an interpreter, on a busy machine
_ASK = "import sys; print(sys.version_info[0], sys.version_info[1], sys.base_prefix, sys.version.replace('\\n', ' '))"


def interpreter(requirements: Sequence[str], python: str | None, seconds: float) -> str:
    """Return the path of an interpreter with these requirements: ``python`` (None: this process's) if there are none,
    else the one of a virtual environment, which is made within ``seconds`` if it isn't in the cache. Raises
    ``ConfigError`` if that fails, ``DeadlineError`` if it takes longer."""
    chosen, version = _found(python)
    if not requirements:
        return chosen
    lines = [_checked(line) for line in requirements]
    content = json.dumps([lines, [_file_digest(line) for line in lines], version, __version__])
    folder = cache_folder().parent / "environments" / hashlib.sha256(content.encode()).hexdigest()[:16]
    end = time.monotonic() + seconds
    with error_context(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), end) as lock:
        if not (folder / "complete").exists():
            log.info("installing %s into %s", ", ".join(lines), folder)
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, chosen, lines, lock, end)
            write_atomically(folder / "complete", content)
    return str(folder / "bin" / "python")


def read_requirements(path: Path) -> list[str]:
    """Return the lines of a file of requirements, without comments."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"requirements: the file {path} can't be read: {error}") from None
    return [line for each in lines if (line := each.partition(" #")[0].strip()) and not line.startswith("#")]


def _found(python: str | None) -> tuple[str, str]:
    """Return the path and the version of an interpreter, which must import the packages of this process."""
    path = sys.executable if python is None else shutil.which(os.path.expanduser(python))
    if path is None:
        raise ConfigError(f"python: the interpreter {python} was not found; name its path or a program on PATH")
    problem = f"python: {path} doesn't run as a Python interpreter"
    try:
        asked = subprocess.run(
            [path, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
        )
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{problem}: it gave no answer within {_ASK_S:g} s") from None
    major, minor, *version = asked.stdout.split(" ") if asked.returncode == 0 else ("", "")
    if not version:
        raise ConfigError(f"{problem}: {_last(asked.stderr)}")
    if (major, minor) != tuple(map(str, sys.version_info[:2])):
        raise ConfigError(
            f"python: {path} is Python {major}.{minor} and whet runs under Python {sys.version_info[0]}."
            f"{sys.version_info[1]}, whose compiled packages it can't import; name an interpreter of the same version"
        )
    return path, " ".join(version).strip()


def _checked(line: str) -> str:
    if line.split("=")[0].split(" ")[0] in _OWN_FILES:
        raise ConfigError(f"requirements: {line!r} refers to another file; write its requirements here")
    path = _path_in(line)
    if (line.startswith(".") or "/" in line) and path.is_dir():
        raise ConfigError(
            f"requirements: {line!r} is a folder, of which a change would not be noticed: the virtual environment with "
            f"its first content would be used again. Build a wheel (pip wheel --no-deps {path}) and name its file"
        )
    return line


def _file_digest(line: str) -> str:
    """Return the digest of the file that a requirement names ("tool @ file:///...", "./tool.whl"), if any."""
    path = _path_in(line)
    return sha256(path) if path.is_file() else ""


def _path_in(line: str) -> Path:
    """Return what would be the path in a requirement, without its name, extras, hash and marker.

    >>> _path_in("tool @ file:///wheels/tool.whl#sha256=12 ; python_version > '3'"), _path_in("./tool.whl[fast]")
    (PosixPath('/wheels/tool.whl'), PosixPath('tool.whl'))
    """
    url = re.search(r"file://([^\s#]+)", line)
    return Path(unquote(url[1]) if url else re.sub(r"\[.*", "", line.partition(";")[0].strip()))


def _make(folder: Path, python: str, requirements: Sequence[str], lock: int, end: float) -> None:
    uv = shutil.which("uv")
    here = str(folder / "bin" / "python")
    if uv:
        create = [uv, "venv", "--quiet", "--no-project", "--python", python, str(folder)]
        install = [uv, "pip", "install", "--quiet", "--python", here]
    else:
        create = [python, "-m", "venv", str(folder)]
        install = [here, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        install += ["--retries", "2", "--timeout", "15"]
    _run(create, lock, end, f"no virtual environment could be made by {' '.join(create[:3])}")
    listed = folder / "requirements.txt"
    write_atomically(listed, "\n".join(requirements) + "\n")
    _run([*install, "-r", str(listed)], lock, end, f"the requirements {', '.join(requirements)} can't be installed")


def _run(command: Sequence[str], lock: int, end: float, problem: str) -> None:
    """Run a command that holds the lock. Raises ``ConfigError`` with the ``problem`` and its last message."""
    # Variables of the run's own environment could send the packages to another folder.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment | {"PIP_USER": "0"},
        pass_fds=[lock],
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{problem} within data.install_s; raise it, or install them beforehand") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    if process.returncode:
        why = "; no package index was reached" if any(each in output for each in _UNREACHABLE) else ""
        raise ConfigError(f"{problem}{why}: {_last(output)}")


def _last(output: str) -> str:
    """Return the last message of an installer; the message of uv may fill several lines."""
    lines = [line.strip(" │╰├─▶×") for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else " ".join(lines[-4:])[-500:] or "it wrote nothing"


@contextmanager
def _locked(path: Path, end: float) -> Iterator[int]:
    """Hold the lock of a file; yield its descriptor, which child processes may inherit."""
    with error_context(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"another process has held {path} for longer than data.install_s; wait for its installation, "
                        "or end it"
                    ) from None
                time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)
