"""The server of ``whet watch`` over real connections."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.show.browser import browse, needs_browser
from tests.show.runs import record, small_run, train_values
from whet.base.errors import ConfigError
from whet.checkpoint.lock import run_lock
from whet.metrics.rollout_file import write_rollouts
from whet.metrics.sinks.jsonl import JSONLSink
from whet.watch import server as server_module
from whet.watch.server import Watch

pytestmark = pytest.mark.timeout(120)
WAIT = 60.0  # seconds, so that a busy machine fails no test


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path / "run")


class Served:
    """A server in a thread."""

    def __init__(self, *folders):
        self.folders = folders
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    async def serve(self):
        self.loop = asyncio.get_running_loop()
        self.watch = Watch(self.folders)
        self.base, _, self.token = self.watch.url.partition("?token=")
        self.ready.set()
        await self.watch.serve()

    def get(self, path="", token=None, **query):
        query["token"] = self.token if token is None else token
        return httpx.get(self.base + path, params=query, timeout=WAIT)

    @contextmanager
    def events(self):
        """Yield an iterator of events."""
        with httpx.stream("GET", f"{self.base}events", params={"token": self.token}, timeout=WAIT) as answer:
            yield (json.loads(line[6:])["runs"] for line in answer.iter_lines() if line.startswith("data: "))

    def until(self, condition):
        """Read events until one fulfils a condition, and return it."""
        with self.events() as events:
            return next(runs for runs in events if condition(runs))

    def close(self):
        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.watch.close(), self.loop).result(WAIT)

    def connections(self):
        return len(self.watch._connections)


@contextmanager
def served(*folders):
    server = Served(*folders)
    server.thread.start()
    assert server.ready.wait(WAIT)
    try:
        yield server
    finally:
        server.close()
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


def eventually(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def add_step(run, step):
    """As a run does: the rollouts of a step are whole before its metrics are written."""
    write_rollouts(run, step, [record(step, 0)])
    sink = JSONLSink().open(run, {}, resume_step=step - 1)
    sink.write(step, train_values(step))
    sink.close()


def test_the_page_its_charts_and_rollouts_need_the_token(run):
    with served(run) as server:
        for path in ("", "events", "charts", "rollouts", "rollout", "elsewhere"):
            for token in ("", "x", server.token[:-1], "é"):
                answer = server.get(path, token=token)
                assert (answer.status_code, answer.text) == (
                    403,
                    "wrong token: open the address that whet watch printed",
                )
        page = server.get()
        assert page.status_code == 200
        assert "connect-src 'self'" in page.text
        assert page.headers["referrer-policy"] == "no-referrer"
        assert server.token not in page.text


def test_nothing_can_be_changed_and_no_path_leads_to_a_file(run):
    with served(run) as server:
        for path in ("../../etc/passwd", "..%2f..%2fetc/passwd", "rollouts/step-000001.jsonl", "recipe.yaml", "%00"):
            assert server.get(path).status_code == 404
        for query in ({"at": "../1:0"}, {"at": "1:-1"}, {"at": "1:7"}, {"at": "1"}, {}):
            assert server.get("rollout", **query).status_code == 400
        named = {"params": {"token": server.token}, "timeout": WAIT}
        assert httpx.post(f"{server.base}charts", **named).status_code == 405
        assert httpx.delete(server.base, **named).status_code == 405


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("charts", {"run": 1}, "run 1 is not watched"),
        ("charts", {"run": -1}, "run:"),
        ("charts", {"low": "a"}, "low:"),
        ("charts", {"other": 1}, "other:"),
        ("rollouts", {"step": "x"}, "step:"),
        ("rollouts", {"verdict": "good"}, "verdict:"),
        ("rollouts", {"next": "8:3"}, "no rollout begins at byte 3"),
        ("rollouts", {"sort": "reward"}, "choose a step"),
        ("rollouts", {"text": "x" * 1001}, "text:"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_named(run, path, query, words):
    with served(run) as server:
        answer = server.get(path, **query)
        assert answer.status_code == 400
        assert words in answer.text


def test_a_step_reaches_fifty_clients_at_once(run):
    with served(run) as server:
        seen = []

        def follow():
            seen.append(server.until(lambda runs: runs[0]["step"] == 9)[0]["version"])

        clients = [threading.Thread(target=follow) for _ in range(50)]
        for client in clients:
            client.start()
        eventually(lambda: server.connections() >= 50)
        add_step(run, 9)
        for client in clients:
            client.join(WAIT)
        assert len(seen) == 50
        charts = server.get("charts").json()
        assert charts["learning"][0]["lines"][0]["x"] == list(range(1, 10))
        assert server.get("rollouts").json()["rollouts"][0]["step"] == 9
        eventually(lambda: server.connections() <= 2)


def test_a_zoom_reads_the_steps_of_the_range(run):
    with served(run) as server:
        server.until(lambda runs: runs[0]["read"] == 1)
        assert server.get("charts", low=3, high=5).json()["learning"][0]["lines"][0]["x"] == [3, 4, 5]


def test_the_state_follows_the_process_that_holds_the_folder(run, monkeypatch):
    monkeypatch.setattr("whet.watch.watched._OFTEN", 0.0)
    with served(run) as server:
        with run_lock(run):
            assert server.until(lambda runs: runs[0]["state"] == "running")[0]["steps"] == 20
        stopped = server.until(lambda runs: runs[0]["state"] == "stopped")[0]
        assert ["stopped", "no process trains this run any more; it ended at step 8 of 20"] in stopped["alarms"]


def test_a_folder_that_vanishes_leaves_its_curves_and_the_other_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr("whet.watch.watched._OFTEN", 0.0)
    other = small_run(tmp_path / "other")
    with served(run, other) as server:
        server.until(lambda runs: runs[0]["read"] == 1 and runs[1]["read"] == 1)
        shutil.rmtree(run)
        gone, there = server.until(lambda runs: runs[0]["state"] == "gone")
        assert (gone["step"], there["state"], there["recorded"]) == (8, "stopped", 8)
        assert len(server.get("charts").json()["learning"]) > 3
        assert server.get("rollouts").json()["rollouts"] == []


def test_a_folder_that_does_not_answer_delays_only_its_own_run(run, tmp_path, monkeypatch):
    other = small_run(tmp_path / "other")
    free = threading.Event()
    with served(run, other) as server:
        monkeypatch.setattr(server.watch.runs[0], "rollouts", lambda *_: free.wait(WAIT) and b"{}")
        monkeypatch.setattr(server_module, "DEADLINE", 0.2)
        answer = server.get("rollouts", run=0)
        assert (answer.status_code, answer.text) == (503, "the run folder does not answer; try again")
        monkeypatch.setattr(server_module, "DEADLINE", WAIT)
        assert server.get("rollouts", run=1).status_code == 200
        free.set()


def test_a_client_that_takes_nothing_is_disconnected(run, monkeypatch):
    monkeypatch.setattr(server_module, "DEADLINE", 0.3)
    monkeypatch.setattr(server_module, "HEARTBEAT", 0.3)
    monkeypatch.setattr("whet.watch.watched._OFTEN", 0.0)
    with served(run) as server:
        server.watch.runs[0]._overview.recipe = "x" * 8_000_000  # larger than the buffers of a connection
        eventually(lambda: len(server.watch._state) > 8_000_000)
        address = server.base.removeprefix("http://").rstrip("/").split(":")
        eventually(lambda: server.connections() == 0)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(WAIT)
            client.connect((address[0], int(address[1])))
            eventually(lambda: server.connections() == 1)
            client.sendall(f"GET /events?token={server.token} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            eventually(lambda: server.connections() == 0)


def test_clients_that_leave_leave_nothing_behind(run):
    with served(run) as server:
        for _ in range(20):
            with server.events() as events:
                next(events)
        eventually(lambda: server.connections() == 0)


def test_a_damaged_line_is_named_and_the_run_is_followed(run):
    with served(run) as server, server.events() as events:
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{torn\n" + json.dumps({"step": 9, "loss": 1.0}) + "\n")
        runs = next(runs for runs in events if runs[0]["step"] == 9)
        assert any("1 damaged lines" in text for _, text in runs[0]["warnings"])


def test_an_address_that_is_taken_is_an_error(run):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another port"):
        Watch([run], port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match=r"can't listen on 203\.0\.113\.1"):
        Watch([run], host="203.0.113.1")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_once_and_ends_with_one_line(run, sent):
    command = [sys.executable, "-m", "whet", "watch", str(run), str(run / ".." / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[0].startswith("http://127.0.0.1:")
        answer = httpx.get(lines[0].strip(), timeout=WAIT)
        assert answer.status_code == 200
        process.send_signal(sent)
        rest, errors = process.communicate(timeout=WAIT)
    assert (lines[1], rest, errors, process.returncode) == ("stop with Ctrl-C\n", "stopped\n", "", 0)


def test_a_folder_that_is_not_a_run_is_named(tmp_path):
    command = [sys.executable, "-m", "whet", "watch", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 2
    assert "there is no such run folder" in done.stderr


@needs_browser
def test_a_browser_follows_two_runs_hides_one_and_searches(run, tmp_path):
    other = small_run(tmp_path / "other")
    with served(run, other) as server:
        lines = "document.querySelectorAll('[data-key=\"reward/mean\"] polyline.line').length"
        writer = threading.Timer(2.0, add_step, (run, 9))
        writer.start()
        result = browse(
            server.watch.url,
            f"{lines} === 2",
            "document.getElementById('state').textContent",
            "document.querySelectorAll('.card').length === 20",
            "document.getElementById('state').textContent.includes('step 9 of 20')",
            "document.querySelector('.card .at')?.textContent === '9'",
            "document.querySelector('#legend input').click() || true",
            f"{lines} === 1",
            "(() => { const t = document.getElementById('by-text'); t.value = 'onerror';"
            " t.dispatchEvent(new Event('input')); return true })()",
            "document.getElementById('count').textContent === '8 rollouts'",
            "document.querySelector('.card summary').click() || true",
            "document.querySelectorAll('.card[open] .answer i').length === 7",
        )
        writer.join()
    assert result["messages"] == []
    assert all(address.startswith(server.base) for address in result["asked"])


@needs_browser
def test_a_browser_says_that_the_server_is_gone(run, monkeypatch):
    shown = threading.Event()

    async def nothing(watch, request):
        shown.set()
        return await answer_nothing(watch, request)

    answer_nothing = Watch._nothing
    monkeypatch.setattr(Watch, "_nothing", nothing)
    with served(run) as server:
        end = threading.Thread(target=lambda: shown.wait(WAIT) and server.close())
        end.start()
        result = browse(
            server.watch.url, "document.querySelectorAll('svg.chart').length > 3",
            f"fetch('shown?token={server.token}') && true",
            "document.getElementById('lost').hidden === false",
        )  # fmt: skip
        end.join()
    assert result["values"] == [True, True, True]
