"""A Ray cluster that a run starts: access to it, and its leftovers."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.workers import alive
from tests.contracts.fault_contract import eventually
from whet.cluster import ray_connection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed"),
]


@pytest.fixture
def controller() -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """Yield a process that runs workers in a private Ray cluster, after Ray was imported; and its report."""
    script = """
        import asyncio, json, os, time
        import ray
        from tests.contracts.cluster_contract import Counter, CounterConfig
        from whet.cluster.base import Placement
        from whet.cluster.config import RayClusterConfig

        async def main():
            cluster = RayClusterConfig(cpus_per_rank=0.25).build()
            group = cluster.launch(Counter, CounterConfig(), Placement(ranks=2))
            pids = [pid for pid, _ in await group.call("thread")]
            context = ray.get_runtime_context()
            environment = [name for name in os.environ if name.startswith("RAY_AUTH")]
            report = {"pids": pids, "address": context.gcs_address, "environment": environment}
            report["folder"] = os.path.dirname(context.get_temp_dir())
            print(json.dumps(report), flush=True)
            input()
            await group.close()
            await cluster.close()
            print("closed", flush=True)
            input()

        asyncio.run(main())
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], text=True, **pipes) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.kill()


def family(pid: int) -> set[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    members, new = {pid}, [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        members |= set(new)
    return members


def listening(pids: set[int]) -> set[str]:
    """Return the addresses at which the processes listen, in the kernel's format."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


def test_it_listens_on_loopback_only_and_other_children_do_not_get_its_token(controller: Any) -> None:
    process, report = controller
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    addresses = listening(family(process.pid))
    assert addresses
    assert addresses <= loopback
    assert report["environment"] == []
    assert report["address"].startswith("127.0.0.1:")


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_client_without_the_token_cannot_connect(controller: Any, mode: str, tmp_path: Path) -> None:
    _, report = controller
    code = f"import ray; ray.init(address='{report['address']}'); print('connected')"
    environment = os.environ | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64, "HOME": str(tmp_path)}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray connects to the machine's external address
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "connected" not in done.stdout
    assert "InvalidAuthToken" in done.stderr


def test_its_sockets_and_logs_are_in_a_folder_that_only_this_user_can_enter(controller: Any) -> None:
    _, report = controller
    assert Path(report["folder"]).stat().st_mode & 0o777 == 0o700
    assert list(Path(report["folder"]).glob("ray/session_*/sockets/*"))


def test_nothing_is_left_after_close(controller: Any) -> None:
    process, report = controller
    started = family(process.pid) - {process.pid}
    assert len(started) > 4
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "closed\n"
    assert eventually(lambda: not any(map(alive, started)))
    assert not Path(report["folder"]).exists()


def test_no_process_is_left_when_the_run_is_killed_not_even_a_frozen_worker(controller: Any) -> None:
    process, report = controller
    started = family(process.pid)
    os.kill(report["pids"][0], signal.SIGSTOP)
    process.kill()
    process.wait()
    assert eventually(lambda: not any(map(alive, report["pids"])), 20.0)
    assert eventually(
        lambda: not any(map(alive, started)), 150.0
    )  # Ray's agents check on their parent only periodically


@pytest.mark.parametrize("parent", ["/a/folder/of-17-ch", "/a/folder/of-18-chr"])
def test_its_sockets_have_paths_that_the_system_allows(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    created = list[tuple[str, Path | None]]()
    monkeypatch.setattr(ray_connection, "Scratch", lambda *arguments: created.append(arguments))
    monkeypatch.setattr(tempfile, "tempdir", parent)
    ray_connection._private_folder()
    ((purpose, within),) = created
    folder = f"{within or parent}/whet-tmp-{purpose}-12345678"
    assert len(f"{folder}/ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store") <= 107
