"""Killed again and again, at any moment and in any process, an asynchronous run of several turns loses no prompt and
counts none twice."""

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
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.checkpoint.store import CheckpointStore
from whet.core.types import Message, Task
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.rollouts.audit import audit
from whet.tasks.base import Environment, Observation, Step

ROOT = Path(__file__).parents[2]


class Twice(Lowercase):
    """The first reply is answered with a question; the second one counts."""

    def make(self, task: Task) -> Environment:
        return _Twice(self, task)


class _Twice:
    def __init__(self, tasks: Twice, task: Task) -> None:
        self.tasks, self.task, self.replies = tasks, task, 0

    async def start(self) -> Observation:
        return Observation(list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        self.replies += 1
        if self.replies == 1:
            return Step(0.0, done=False, messages=[{"role": "user", "content": "sure?"}])
        scores = await self.tasks.grade(self.task, reply["content"])
        return Step(scores.pop("reward"), scores=scores)

    async def close(self) -> None:
        """Nothing is held."""


def family(process: int) -> list[int]:
    """A process and all below it."""
    found = [process]
    for one in found:
        with contextlib.suppress(OSError):  # it has ended
            for children in Path(f"/proc/{one}/task").glob("*/children"):  # each thread has its own
                found += map(int, children.read_text().split())
    return found


def whet(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(run: Path) -> int:
    return len((run / FILE).read_bytes().splitlines()) if (run / FILE).exists() else 0


def wait_for(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Wait until the log has ``count`` lines, or the process has ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None and lines(run) < count:
        assert time.monotonic() < deadline, "nothing has happened for four minutes"
        time.sleep(0.02)


CLUSTERS: dict[str, dict[str, Any]] = {
    "processes": {"cluster": {"type": "processes"}},
    "ray": {
        "cluster": {"type": "ray", "cpus_per_rank": 0.5, "restarts": 100},
        "generator": {"type": "tests.engines.hosted:HostableConfig", "on_cluster": True, "replicas": 2},
    },
}


@pytest.mark.parametrize(
    ("cluster", "kills"),
    [
        pytest.param("processes", 25, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("ray", 40, marks=[pytest.mark.hours, pytest.mark.timeout(7200)]),
    ],
)
def test_kills_of_any_process_leave_the_ledger_exact(
    cluster: str, kills: int, tiny_model: Path, tmp_path: Path
) -> None:
    if cluster == "ray":
        pytest.importorskip("ray")
    recipe = toy_recipe(
        tiny_model,
        steps=100_000,
        data={"type": "tests.e2e.test_kills:Twice", "size": 7},
        algorithm={
            "type": "grpo",
            "group_size": 2,
            "filters": [{"type": "tests.rollouts.simulator:Dull", "share": 0.3}],
        },
        sampling={"max_turns": 2, "max_observation_tokens": 32, "max_episode_tokens": 192},
        rollouts={"prompts_per_step": 2, "max_staleness": 2, "order": "ready", "max_sampling_rounds": 50},
        evaluation={"enabled": False},
        checkpoints={"every": 1, "asynchronous": True},
        **CLUSTERS[cluster],
    )
    run, dice, pause = tmp_path / "run", random.Random(11), 5 if cluster == "processes" else 20
    command = ["train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run)]
    for number in range(kills):
        before, process = lines(run), whet(*command)
        if number % 5:  # each fifth kill comes while the run is starting
            wait_for(process, run, before + 2)
            assert process.poll() is None, process.communicate()[1]
        time.sleep(dice.uniform(0, 1.5 if number % 5 else pause))
        struck = dice.choice(family(process.pid))
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            print(number, " ".join(psutil.Process(struck).cmdline())[-100:], flush=True)
            os.kill(struck, signal.SIGKILL)
        wait_for(process, run, lines(run) + 2)  # it ends, or can do without
        process.kill()
        error = process.communicate(timeout=60)[1]
        assert process.returncode != 0, error
        if (run / "recipe.yaml").exists():
            command = ["resume", str(run)]
        if CheckpointStore(run / "checkpoints").steps():
            assert not audit(run).violations
    ends_exactly(run)


def ends_exactly(run: Path, prompts: int = 2, **environment: str) -> None:
    """Three more steps end the run, and its ledger counts each prompt once."""
    step = CheckpointStore(run / "checkpoints").latest() or 0
    last = whet("resume", str(run), f"steps={step + 3}", **environment)
    error = last.communicate(timeout=180)[1]
    assert last.returncode == 0, error
    found = audit(run)
    assert not found.violations
    assert (found.step, found.later) == (step + 3, 0)
    assert sum(counts["trained"] for counts in found.by_epoch().values()) == prompts * found.step
    assert [line["step"] for line in read_metrics(run / FILE)] == list(range(found.step + 1))


AGENT = """
import json, os, subprocess, sys, urllib.request

subprocess.Popen(["sleep", "1000"], start_new_session=True)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": "policy", "messages": json.load(sys.stdin)}).encode()
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
request = urllib.request.Request(f"{url}/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""
ROLES = {"worker": "whet.processes.service:serving", "agent": "agent.py", "run": "-m whet"}


def victim(run: int, role: str) -> int:
    """A process of the role, or the run itself if there is none within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for process in family(run):
            with contextlib.suppress(psutil.Error):
                if ROLES[role] in " ".join(psutil.Process(process).cmdline()):
                    return process
        time.sleep(0.01)
    return run


def alive(scratch: Path) -> list[list[str]]:
    """The commands of all processes with this temporary folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(scratch):
                found.append(process.cmdline())
    return found


def left_in_memory(before: set[str]) -> set[str]:
    """The files in shared memory that are new and that no process uses: other programs of this machine use theirs.
    Semaphores of multiprocessing are other programs', too, until a second process opens them: a run makes none."""
    left = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} - before
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            text = maps.read_text()
            left = {name for name in left if f"/dev/shm/{name}" not in text}
    return left


KILLS = int(os.environ.get("WHET_TEST_KILLS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(60 * KILLS)
def test_kills_of_workers_agents_and_runs_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    taskset = {"type": "workers", "processes": 2, "taskset": {"type": "tests.e2e.test_kills:Twice", "size": 7}}
    program = [sys.executable, "-S", str(tmp_path / "agent.py")]
    agent = {"type": "agent", "program": program, "taskset": {"type": "workers", "taskset": "tests.toy:Lowercase"}}
    recipe = toy_recipe(
        tiny_model,
        steps=100_000,
        data={"type": "blend", "of": {"tools": {"taskset": taskset}, "agents": {"taskset": agent}}},
        algorithm={"type": "grpo", "group_size": 2},
        sampling={"max_turns": 2, "max_observation_tokens": 32, "max_episode_tokens": 192},
        rollouts={"prompts_per_step": 2, "max_staleness": 1, "retries": 20, "retry_delay": 0.0},
        evaluation={"enabled": False},
    )
    run, dice, scratch = tmp_path / "run", random.Random(5), tmp_path / "scratch"
    scratch.mkdir()
    memory = set(os.listdir("/dev/shm"))
    command = ["train", str(write_recipe(tmp_path / "toy.yaml", recipe)), "--folder", str(run)]
    process, struck = whet(*command, TMPDIR=str(scratch)), 0
    while struck < KILLS:
        wait_for(process, run, lines(run) + 1)
        assert process.poll() is None, process.communicate()[1]
        time.sleep(dice.uniform(0, 0.5))
        role = dice.choices(list(ROLES), [2, 2, 1])[0]
        one = victim(process.pid, role)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(one, signal.SIGKILL)
            struck += 1
        print(struck, role, flush=True)
        if one != process.pid:
            continue
        process.communicate(timeout=60)
        assert eventually(lambda: not alive(scratch), 20.0), alive(scratch)
        assert not audit(run).violations
        process = whet("resume", str(run), TMPDIR=str(scratch))
    process.terminate()
    process.communicate(timeout=60)
    ends_exactly(run, TMPDIR=str(scratch))
    assert not alive(scratch)
    assert not list(scratch.iterdir())
    assert eventually(lambda: not left_in_memory(memory)), left_in_memory(memory)
    rows = read_metrics(run / FILE)
    assert sum(row.get("environment_workers/restarts", 0) for row in rows) > 0
    assert sum(row.get("groups/failed", 0) for row in rows) == 0
