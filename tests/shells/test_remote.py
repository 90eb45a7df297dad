"""Runtimes on a server: the contract of runtimes over HTTP, and what happens to clients and servers that are lost."""

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.contracts.fault_contract import eventually
from tests.contracts.runtime_contract import LIMITS, RuntimeContract, text
from tests.endpoint.certificates import certificate
from whet.base.errors import ConfigError
from whet.cli.shells import shells
from whet.shells.local import Local, _problem
from whet.shells.remote import Message, Remote
from whet.shells.runtime import RuntimeFailure, ShellLimits
from whet.shells.serving import RuntimeServer, ShellServer
from whet.tasks.shell.generated import ShellTasks
from whet.tasks.validate import validate, wrong

TOKEN = "secret-of-the-test"
pytestmark = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")


@contextmanager
def served(limits: ShellLimits = LIMITS, **settings: object) -> Iterator[RuntimeServer]:
    server = RuntimeServer(ShellServer(port=0, runtime=Local(limits=limits), **settings), TOKEN)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHET_SHELLS_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[RuntimeServer]:
    with served(most=4) as server:
        yield server


class TestContract(RuntimeContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls, server: RuntimeServer) -> Remote:
        return Remote(url=server.url, limits=LIMITS)


def asked(server: RuntimeServer, path: str, body: bytes, token: str = TOKEN) -> tuple[int, str]:
    """Return the status and the problem of one request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, str(Message.unpacked(response.read()).fields.get("problem"))
    finally:
        connection.close()


OPEN = Message({"limits": LIMITS.model_dump()}).packed()


@pytest.mark.parametrize(
    ("path", "body", "token", "status", "problem"),
    [
        ("/open", OPEN, "wrong", 401, "the token is wrong"),
        ("/open", OPEN, "wr\u00f6ng", 401, "the token is wrong"),
        ("/open", b"no json", TOKEN, 400, "a line of JSON, then bytes"),
        ("/open", b"[" * 100_000, TOKEN, 400, "a line of JSON, then bytes"),
        ("/open", b'{"work": "/../etc"}', TOKEN, 400, "is not a folder below the root"),
        ("/open", b'{"limits": {"memory_mib": 1}}', TOKEN, 400, "limits.memory_mib: Input should be greater"),
        ("/open", b'{"limits": {"memory_mib": 9999}}', TOKEN, 400, "limits.memory_mib = 9999 is above 256"),
        ("/open", b"x" * 9_500_000, TOKEN, 413, "a request has at most"),
        ("/link", b'{"key": "0"}', TOKEN, 404, "there is no open runtime with this key"),
        ("/run", b"{}", TOKEN, 400, "the first request of a connection must be POST /open"),
    ],
)
def test_what_is_not_a_valid_request_is_refused_in_words(
    server: RuntimeServer, path: str, body: bytes, token: str, status: int, problem: str
) -> None:
    try:
        got = asked(server, path, body, token.encode("utf-8").decode("latin-1"))
    except ConnectionError:  # the server closed the connection while a long body was sent
        assert status == 413
        return
    assert got[0] == status
    assert problem in got[1]


def test_a_wrong_request_of_an_open_runtime_closes_it(server: RuntimeServer) -> None:
    runtime = Remote(url=server.url, limits=LIMITS).open()
    with pytest.raises(RuntimeFailure, match=r"not a valid request /run: 'seconds'"):
        runtime._ask("run", Message({}))
    with pytest.raises(RuntimeFailure, match="is closed"):
        runtime.run("echo alive")
    assert eventually(lambda: server._runtimes == 0)


def test_an_episode_waits_for_the_end_of_another(server: RuntimeServer) -> None:
    kind = Remote(url=server.url, limits=LIMITS)
    opened = [kind.open() for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.shells.serving.ROOM_S", 0.1)
        with pytest.raises(RuntimeFailure, match=r"HTTP 503\): all of its 4 runtimes were in use for 0.1 s"):
            kind.open()
    threading.Timer(0.2, opened[0].close).start()
    assert text(kind.open().run("echo alive")) == "alive\n"
    for runtime in opened[1:]:
        runtime.close()
    assert eventually(lambda: server._runtimes == 0)


def test_a_run_that_is_lost_during_a_command_ends_it(server: RuntimeServer) -> None:
    runtime, failures = Remote(url=server.url, limits=LIMITS).open(), list[RuntimeFailure]()

    def run() -> None:
        try:
            runtime.run("sleep 31538")
        except RuntimeFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: subprocess.run(["pgrep", "-f", "^sleep 31538"], check=False).returncode == 0)
    runtime.close()
    assert eventually(lambda: server._runtimes == 0)
    assert eventually(lambda: subprocess.run(["pgrep", "-f", "^sleep 31538"], check=False).returncode == 1)
    thread.join(60)
    assert len(failures) == 1


def test_a_killed_run_leaves_no_runtime_on_the_server(server: RuntimeServer) -> None:
    program = (
        "import sys; from whet.shells.remote import Remote; from whet.shells.runtime import ShellLimits\n"
        f"limits = ShellLimits.model_validate_json({LIMITS.model_dump_json()!r})\n"
        f"runtime = Remote(url={server.url!r}, limits=limits).open()\n"
        "print(runtime.run('echo alive').output, flush=True)\n"
        "sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"b'alive\\n'\n"
    assert eventually(lambda: server._runtimes == 1)  # what an earlier test closed may still end
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert eventually(lambda: server._runtimes == 0)


def test_a_server_that_ends_is_a_failure_and_never_an_output() -> None:
    program = "from whet.cli.main import main; main(['shells', 'port=0', 'most=2'])"
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().rpartition(" ")[2].strip()
    assert server.stdout.readline() == "token: the value of WHET_SHELLS_TOKEN\n"
    runtime = Remote(url=url).open()
    assert text(runtime.run("echo alive")) == "alive\n"
    server.send_signal(signal.SIGKILL)
    server.wait()
    with pytest.raises(RuntimeFailure, match=f"the runtime on {url} was lost: "):
        runtime.run("echo alive")
    with pytest.raises(ConfigError, match=f"runtime.url: no connection to the server {url}: Connection refused"):
        Remote(url=url).check()


def test_connections_that_send_nothing_are_closed_and_keep_nobody_out(server: RuntimeServer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.shells.serving_connection._PATIENCE_S", 0.5)
        silent = [socket.create_connection(("127.0.0.1", server.server_address[1]), 60) for _ in range(50)]
        assert eventually(lambda: server._connections >= 50 or not all(map(_is_open, silent)))
    for connection in silent[:25]:
        with suppress(OSError):
            connection.sendall(b"POST /open HTTP/1.1\r\nContent-Length: 99\r\n")
    runtime = Remote(url=server.url, limits=LIMITS).open()
    assert text(runtime.run("echo alive")) == "alive\n"
    assert eventually(lambda: not any(map(_is_open, silent)))
    assert text(runtime.run("echo still alive")) == "still alive\n"
    runtime.close()
    for connection in silent:
        connection.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_commands_travel_encrypted_beyond_loopback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host = 0.0.0.0 is reached from other machines.*set certificate and key"):
        RuntimeServer(ShellServer(host="0.0.0.0", port=0), TOKEN)
    with pytest.raises(ConfigError, match="certificate and key belong together"):
        RuntimeServer(ShellServer(certificate="cert.pem", port=0), TOKEN)
    with pytest.raises(ConfigError, match=r"certificate = cert.pem, key = key.pem: .*No such file"):
        RuntimeServer(ShellServer(certificate="cert.pem", key="key.pem", port=0), TOKEN)
    made, key = certificate(tmp_path)
    with served(certificate=str(made), key=str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        Remote(url=server.url, certificate=str(made), limits=LIMITS).check()
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            Remote(url=server.url, limits=LIMITS).check()


def test_settings_that_cannot_work_are_named(server: RuntimeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not the address of a server"):
        Remote(url="node7")
    for file, why in (("/no/such.pem", "No such file"), (__file__, "NO_CERTIFICATE")):
        with pytest.raises(ConfigError, match=rf"^runtime.certificate = {file}: .*{why}.*; name a file with"):
            Remote(url="https://127.0.0.1:9", certificate=file).check()
    with pytest.raises(ConfigError, match=r"runtime.url: the server .* refuses open \(HTTP 400\): limits.memory_mib"):
        Remote(url=server.url, limits=ShellLimits(memory_mib=300)).check()
    monkeypatch.setenv("WHET_SHELLS_TOKEN", "wrong")
    with pytest.raises(ConfigError, match="the token is wrong"):
        Remote(url=server.url, limits=LIMITS).check()
    monkeypatch.setenv("WHET_SHELLS_TOKEN", "two\nlines")
    for use in (Remote(url=server.url, limits=LIMITS).check, shells):
        with pytest.raises(ConfigError, match="the environment variable WHET_SHELLS_TOKEN is not a key"):
            use()
    monkeypatch.delenv("WHET_SHELLS_TOKEN")
    with pytest.raises(ConfigError, match="the environment variable WHET_SHELLS_TOKEN is not set"):
        Remote(url=server.url, limits=LIMITS).check()


def test_a_task_never_knows_where_its_commands_run(server: RuntimeServer) -> None:
    tasks = ShellTasks(
        runtime=Remote(url=server.url, limits=LIMITS), limits={"deadline_s": 90}, train_size=2, test_size=2
    )
    assert wrong(asyncio.run(validate(tasks, 1))) == []
