"""Killed again and again, with shells, containers, agents inside of them and on the machine, and environment workers, a
run leaves nothing behind and its ledger counts each prompt once. Containers are of the stub of an engine."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contracts.fault_contract import eventually
from tests.e2e.test_kills import ROOT, alive, ends_exactly, family, left_in_memory, wait_for, whet
from tests.toy import toy_recipe, write_recipe
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.rollouts.audit import audit
from whet.shells.local import _problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the runtime of the shell needs Linux"),
    pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}"),
]
KILLS = int(os.environ.get("WHET_TEST_KILLS", "20"))
STUB = ROOT / "tests/shells/stub_engine.py"

# An agent that leaves a process behind, and asks the policy once.
AGENT = """
import json, os, subprocess, urllib.request
subprocess.Popen(["sleep", "31535"], start_new_session=True)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request, timeout=60).read()
"""
# The same on the machine, where what it leaves behind has also left its folder and cleared its variables.
HIDING = AGENT.replace('["sleep", "31535"]', '["env", "-i", "sleep", "31535"], cwd="/"')
ROLES = {
    "shell": "whet.shells.inside", "engine": "stub_engine.py", "agent": "OPENAI_BASE_URL",
    "worker": "whet.processes.service", "run": "-m whet",
}  # fmt: skip
TOY = {"type": "tests.toy:Lowercase", "size": 7}
KEEPER = "keeper.py"  # its command has the words of the agent that it keeps
Known = dict[int, float]  # the start of each process


def command_of(process: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(process).cmdline())
    return ""


def victim(run: int, role: str) -> int:
    """A process of the role, or the run itself if there is none within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        commands = {one: command_of(one) for one in family(run)}
        found = [one for one, command in commands.items() if ROLES[role] in command and KEEPER not in command]
        if found:
            return found[-1]
        time.sleep(0.01)
    return run


def noted(run: int, known: Known) -> None:
    """Add a run and all processes below it, in any namespace."""
    for process in family(run):
        with contextlib.suppress(psutil.Error):
            known[process] = psutil.Process(process).create_time()


def remaining(known: Known) -> list[str]:
    found = []
    for process, started in known.items():
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(process)
            if one.create_time() == started and one.status() != psutil.STATUS_ZOMBIE:
                found.append(command_of(process))
    return found


def agents_in(runtime: dict[str, Any]) -> dict[str, Any]:
    limits = {"memory_mib": 256, "disk_mib": 4, "processes": 20}
    repositories = {"type": "repositories", "train_size": 7, "test_size": 1, "functions": 2}
    repositories |= {"runtime": {**runtime, "limits": limits}}
    return {"type": "agent", "program": ["python3", "-c", AGENT], "in_runtime": True, "taskset": repositories}


def sleeping() -> bool:
    return subprocess.run(["pgrep", "-f", "^sleep 31535"], check=False, capture_output=True).returncode == 0


@pytest.mark.timeout(90 * KILLS + 300)
def test_kills_of_shells_containers_agents_and_runs_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    engine, scratch, run = tmp_path / "engine", tmp_path / "scratch", tmp_path / "run"
    engine.mkdir()
    scratch.mkdir()
    environment = {"TMPDIR": str(scratch), "STUB_ENGINE": str(engine)}
    container = {"type": "container", "image": "programs", "command": str(STUB)}
    recipe = toy_recipe(
        tiny_model,
        steps=100_000,
        data={
            "type": "blend",
            "of": {
                "local": {"taskset": agents_in({"type": "local"})},
                "boxes": {"taskset": agents_in(container)},
                "workers": {"taskset": {"type": "workers", "processes": 1, "taskset": TOY}},
                "machine": {"taskset": {"type": "agent", "program": ["python3", "-c", HIDING], "taskset": TOY}},
            },
        },
        algorithm={"type": "grpo", "group_size": 2},
        sampling={"max_turns": 2, "max_prompt_tokens": 128, "max_episode_tokens": 192},
        rollouts={"prompts_per_step": 4, "max_staleness": 1, "retries": 20, "retry_delay": 0.0},
        evaluation={"enabled": False},
    )
    dice, memory, known = random.Random(7), set(os.listdir("/dev/shm")), Known()
    command = ["train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run)]
    process, struck = whet(*command, **environment), 0
    while struck < KILLS:
        wait_for(process, run, len((run / FILE).read_bytes().splitlines()) + 1 if (run / FILE).exists() else 1)
        assert process.poll() is None, process.communicate()[1]
        time.sleep(dice.uniform(0, 0.5))
        role = dice.choices(list(ROLES), [2, 2, 2, 2, 1])[0]
        one = victim(process.pid, role)
        noted(process.pid, known)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(one, signal.SIGKILL)
            struck += 1
        print(struck, role, "the run" if one == process.pid else one, flush=True)
        if one != process.pid:
            continue
        process.communicate(timeout=60)
        assert eventually(lambda: not alive(scratch) and not remaining(known), 30.0), remaining(known)
        assert not audit(run).violations
        known.clear()
        process = whet("resume", str(run), **environment)
    noted(process.pid, known)
    process.terminate()
    process.communicate(timeout=60)
    ends_exactly(run, prompts=4, **environment)
    assert eventually(lambda: not alive(scratch) and not remaining(known), 30.0), remaining(known)
    assert eventually(lambda: not sleeping()), "a process of an agent remains"
    assert not list(scratch.iterdir())
    assert eventually(lambda: not left_in_memory(memory)), left_in_memory(memory)
    assert sum(row.get("groups/failed", 0) for row in read_metrics(run / FILE)) == 0
