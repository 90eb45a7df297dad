"""Containers: the contract of runtimes over a stub with Docker's arguments that really runs the commands, and over a
real engine where WHET_TEST_ENGINE names one ("podman IMAGE"); lost containers; nothing is left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.contracts.fault_contract import eventually
from tests.contracts.runtime_contract import LIMITS, RuntimeContract
from whet.base.errors import ConfigError
from whet.shells.container import Container, ContainerRuntime
from whet.shells.container_link import listening
from whet.shells.engine import LABEL, Engine, EngineProblem
from whet.shells.local import _problem
from whet.shells.runtime import RuntimeFailure

STUB = str(Path(__file__).with_name("stub_engine.py"))
isolates = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    os.environ["STUB_ENGINE"] = str(folder)
    return folder


@pytest.fixture
def kind(engine_folder: Path) -> Container:
    return Container(image="programs", command=STUB, limits=LIMITS)


@isolates
class TestStub(RuntimeContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls, engine_folder: Path) -> Container:
        return Container(image="programs", command=STUB, limits=LIMITS)


@pytest.mark.skipif("WHET_TEST_ENGINE" not in os.environ, reason="WHET_TEST_ENGINE names no engine and image")
class TestEngine(RuntimeContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls) -> Container:
        command, image = os.environ["WHET_TEST_ENGINE"].split()
        return Container(image=image, command=command, limits=LIMITS)


@isolates
def test_a_container_that_dies_is_a_failure_and_never_an_output(kind: Container, engine_folder: Path) -> None:
    runtime = kind.open()
    Engine(STUB).end(runtime._name)
    with pytest.raises(RuntimeFailure, match=r"the container of an episode failed: .*No such container"):
        runtime.run("echo alive")
    with pytest.raises(RuntimeFailure, match="container"):
        runtime.read("file")
    runtime.close()
    assert eventually(lambda: not list(engine_folder.iterdir()))


@isolates
def test_a_container_that_dies_during_a_command_is_a_failure(kind: Container) -> None:
    runtime = kind.open()
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; {sys.executable} {STUB} kill {runtime._name}"])
    with pytest.raises(RuntimeFailure, match="container"):
        runtime.run("sleep 50")
    killer.wait()
    runtime.close()


def test_what_is_not_there_is_named(kind: Container, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-engine does not start: No such file.*Install and start Docker or"):
        Container(image="programs", command="no-such-engine").check()
    with pytest.raises(ConfigError, match=r"No such image: absent.*pull absent"):
        kind.model_copy(update={"image": "absent"}).check()
    broken = tmp_path / "engine"
    broken.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon. >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="Cannot connect to the Docker daemon"):
        Container(image="programs", command=str(broken)).check()
    with pytest.raises(RuntimeFailure, match="ended: Cannot connect"):
        Container(image="programs", command=str(broken)).open()


def test_an_engine_that_gives_no_answer_is_named(tmp_path: Path) -> None:
    frozen = tmp_path / "engine"
    frozen.write_text("#!/bin/sh\nexec sleep 100\n")
    frozen.chmod(0o755)
    with pytest.raises(EngineProblem, match=r"gave no answer within 0.2 s"):
        Engine(str(frozen)).ask("ps", seconds=0.2)


SCRIPT = """
import sys, threading
from whet.shells.container import Container
runtime = Container(image="programs", command=sys.argv[1]).open()
runtime.run("echo file > file")
threading.Thread(target=runtime.run, args=("setsid sleep 31537 & sleep 31537", 1000)).start()
print("open", flush=True)
threading.Event().wait()
"""


@isolates
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_container(tmp_path: Path, sent: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, STUB], stdout=subprocess.PIPE, env=os.environ | {"STUB_ENGINE": str(tmp_path)}
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"open\n"
    assert len(list(tmp_path.iterdir())) == 1
    owner.send_signal(sent)
    owner.communicate()
    assert eventually(lambda: not list(tmp_path.iterdir()))


def test_the_socket_of_a_link_may_lie_in_a_folder_with_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    unlink, place = listening(socket.socket)
    assert place.is_relative_to(folder)
    assert (place / "socket").is_socket()
    unlink()
    assert not place.exists()


def test_containers_of_ended_runs_are_swept_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    owners = {"mine": f"{os.uname().nodename}/{os.getpid()}/", "other": "another-machine/1/1", "none": ""}
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    owners |= {"alive": f"{os.uname().nodename}/{os.getpid()}/{started}"}
    fake = tmp_path / "engine"
    cases = "".join(f"*' {name}') echo '{value}';;\n" for name, value in owners.items())
    fake.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\ncase "$1" in ps) echo {" ".join(owners)};; '
        f'inspect) case "$*" in\n{cases}esac;; esac\n'
    )
    fake.chmod(0o755)
    assert Engine(str(fake)).sweep() == 1
    ended = [line for line in calls.read_text().splitlines() if line.startswith(("kill", "rm"))]
    assert ended == ["kill mine", "rm --force --volumes mine"]


@pytest.mark.skipif(shutil.which("docker") is None, reason="Docker's command line is not installed")
def test_docker_knows_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no-such-socket")
    engine = Engine("docker")
    with pytest.raises(RuntimeFailure, match=r"(?i)cannot connect|no such file"):
        ContainerRuntime(Container(image="programs"))
    for called in (
        ("exec", "--interactive", "--user=1:1", "--workdir=/", "--env=A=1", "name", "bash"),
        ("ps", "--all", "--quiet", "--filter", f"label={LABEL}"),
        ("rm", "--force", "--volumes", "name"),
        ("kill", "name"),
        ("inspect", "--format", "{{.Id}}", "name"),
        ("image", "inspect", "--format", "{{.Id}}", "name"),
    ):
        with pytest.raises(EngineProblem, match=r"(?i)cannot connect|no such file"):
            engine.ask(*called)
