"""Virtual environments in the cache: made once, whole or not at all. A script stands for ``uv``."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.wheels import toy_wheel
from whet.base.errors import ConfigError, DeadlineError
from whet.processes.virtual_environment import interpreter

UV = """#!/bin/sh
echo "$@" >> "$LOG"
if [ "$1" = venv ]; then
    for folder; do :; done
    mkdir -p "$folder/bin" && ln -s {python} "$folder/bin/python"
elif [ -e "$LOG.wait" ]; then
    while [ -e "$LOG.wait" ]; do sleep 0.05; done
elif [ -e "$LOG.fail" ]; then
    printf '  × No solution found\\n  ╰─▶ Because tool==9 is not there, it cannot be used.\\n' >&2
    exit 1
fi
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of ``uv``, which waits while LOG.wait exists and fails if LOG.fail exists."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(UV.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "log"


def installed(log: Path) -> int:
    return log.read_text().count("pip install") if log.exists() else 0


def wait_for(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while installed(log) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_at_once_make_one(log: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        made = set(threads.map(lambda _: interpreter(["tool==1"], None, 60.0), range(2)))
    assert made == {interpreter(["tool==1"], None, 60.0)}
    assert installed(log) == 1
    assert interpreter(["tool==2"], None, 60.0) not in made


def test_without_requirements_the_interpreter_is_the_named_one(log: Path) -> None:
    assert interpreter([], None, 60.0) == sys.executable
    assert interpreter([], sys.executable, 60.0) == sys.executable
    assert not log.exists()


def test_a_changed_wheel_is_installed_again(log: Path, tmp_path: Path) -> None:
    requirement = toy_wheel(tmp_path, "1.0")
    before = interpreter([requirement], None, 60.0)
    wheel = Path(requirement.partition("file://")[2])
    ways = [requirement, f"{wheel}", f"{wheel}[fast]", f"{requirement} ; python_version > '3'"]
    first = [interpreter([way], None, 60.0) for way in ways]
    wheel.write_bytes(b"another")
    assert not {interpreter([way], None, 60.0) for way in ways} & {before, *first}


@pytest.mark.parametrize(
    "line", ["./tool", "{}/tool", "{}/tool[fast]", "tool @ file://{}/tool", "tool@file://{}/to%6fl"]
)
def test_a_folder_is_refused_because_its_changes_would_not_be_noticed(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").mkdir()
    with pytest.raises(ConfigError, match=r"is a folder, .* Build a wheel \(pip wheel --no-deps .*tool\) and name its"):
        interpreter([line.format(tmp_path)], None, 60.0)
    assert not installed(log)


def test_a_failure_names_the_requirement_and_the_next_attempt_starts_over(log: Path) -> None:
    failing = log.with_name("log.fail")
    failing.touch()
    with pytest.raises(ConfigError, match=r"requirements tool==9 can't be installed: .* Because tool==9 is not there"):
        interpreter(["tool==9"], None, 60.0)
    failing.unlink()
    interpreter(["tool==9"], None, 60.0)
    assert installed(log) == 2


def test_an_installation_that_takes_too_long_is_ended(log: Path) -> None:
    waiting = log.with_name("log.wait")
    waiting.touch()
    with pytest.raises(DeadlineError, match=r"tool==1 can't be installed within data\.install_s"):
        interpreter(["tool==1"], None, 2.0)
    waiting.unlink()
    interpreter(["tool==1"], None, 60.0)  # the lock is free


def test_a_killed_installation_leaves_nothing_that_looks_whole(log: Path) -> None:
    waiting = log.with_name("log.wait")
    waiting.touch()
    script = "from whet.processes.virtual_environment import interpreter; interpreter(['tool==1'], None, 60.0)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(log, 1)
        process.send_signal(signal.SIGKILL)
    with pytest.raises(DeadlineError, match=r"another process has held .*\.lock for longer than data\.install_s"):
        interpreter(["tool==1"], None, 0.5)  # the installer that was left behind holds the lock
    waiting.unlink()
    made = Path(interpreter(["tool==1"], None, 60.0))
    assert installed(log) == 2
    assert (made.parent.parent / "complete").exists()


@pytest.mark.slow  # pip itself; another test names what a stand-in for it can't install
def test_an_index_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)  # no uv: pip itself
    with pytest.raises(ConfigError, match=r"can't be installed; no package index was reached: .* tool==9"):
        interpreter(["--index-url http://127.0.0.1:9/", "tool==9"], None, 100.0)


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(b"\x7fELF")
    (tmp_path / "python").chmod(0o700)
    with pytest.raises(ConfigError, match=r"python: .*python doesn't run as a Python interpreter: Exec format error"):
        interpreter([], str(tmp_path / "python"), 60.0)
