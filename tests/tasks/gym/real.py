"""Real servers of nemo-gym 0.7.0, each a process of a separate interpreter: ``make test-gym``."""

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.endpoint.agents import RENDERER, Scripted
from tests.ports import reserved_ports
from whet.core.types import Episode
from whet.endpoint.config import EndpointConfig
from whet.endpoint.server import Endpoint
from whet.metrics.clock import Timing
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling
from whet.tasks.gym.tasks import NemoGym
from whet.tasks.isolated import IsolatedEnvironments

PYTHON = os.environ.get("WHET_GYM_PYTHON", "")
needs_gym = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="WHET_GYM_PYTHON names no interpreter with nemo-gym (make test-gym)"),
]
_STARTS = 300.0  # seconds for a server to answer, on a busy machine
Settings = dict[str, Any]  # of one server, as Gym writes them: kind -> implementation -> settings


@cache
def gym_folder() -> Path:
    """Return the folder of Gym's servers."""
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([PYTHON, "-c", where], capture_output=True, text=True, check=True).stdout.strip())


def resources(name: str, **more: Any) -> Settings:
    """Return the settings of a resources server of the wheel."""
    return {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other", **more}}}


def agent(server: str, implementation: str = "simple_agent", **more: Any) -> Settings:
    """Return the settings of an agent that calls ``policy_model`` and is verified by ``server``."""
    links = {
        "resources_server": {"type": "resources_servers", "name": server},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    return {"responses_api_agents": {implementation: {"entrypoint": "app.py", **links, **more}}}


def environment(server: str, player: str) -> Settings:
    """Return the settings of an environment server, which plays materialized rows with an agent."""
    links = {
        "resources_server": {"type": "resources_servers", "name": server},
        "agent_server": {"type": "responses_api_agents", "name": player},
        "resources_tool_transports": ["direct_http"],
    }
    return {
        "environment_servers": {"single_agent_turn": {"entrypoint": "app.py", **links, "cleanup_timeout_seconds": 60}}
    }


(PORT,) = reserved_ports(1)  # of the policy, whose address is in the settings of the agents


def episode_of(
    folder: Path, answer: Callable[[str], str], *rows: dict[str, Any], agents: dict[str, str], **limits: Any
) -> Episode:
    """Play the first row with the scripted model."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    taskset = NemoGym(path=str(path), test_size=0, agents=agents, agent_deadline=120)
    sampling = Sampling(**({"max_turns": 10, "max_new_tokens": 400, "max_prompt_tokens": 4000} | limits))

    async def go() -> Episode:
        model: Any = Scripted(answer)
        model.gate.set()
        environments = IsolatedEnvironments(taskset.open())
        endpoint = Endpoint(RENDERER, EndpointConfig(port=PORT))
        more: dict[str, Any] = {"seed": 0, "session": "e", "timing": Timing(), "failures": Failures()}
        try:
            task = taskset.tasks("train")[0]
            return await play(environments, task, model, RENDERER, sampling, retries=0, endpoint=endpoint, **more)
        finally:
            await endpoint.close()
            await environments.close()

    return asyncio.run(go())


@contextlib.contextmanager
def running(
    folder: Path,
    servers: Mapping[str, Settings],
    policy: int = 9,
    elsewhere: Mapping[str, int] | None = None,
    **settings: Any,
) -> Iterator[dict[str, str]]:
    """Start the servers, whose policy listens on the port ``policy``, and yield their URLs. ``elsewhere``: ports of
    resources servers that run already. ``settings`` are Gym's own."""
    ports = dict(zip(servers, reserved_ports(len(servers)), strict=True))
    policy_model = {"responses_api_models": {"whet": {"entrypoint": "app.py", "host": "127.0.0.1", "port": policy}}}
    config: dict[str, Any] = {
        "dry_run": False, "profiling_enabled": False, "head_server": {"host": "127.0.0.1", "port": 9},
        "policy_model": policy_model, **settings,
    }  # fmt: skip
    for name, port in (elsewhere or {}).items():
        config[name] = {"resources_servers": {name: {"host": "127.0.0.1", "port": port}}}
    for name, kinds in servers.items():
        [(kind, implementations)] = kinds.items()
        [(implementation, values)] = implementations.items()
        config[name] = {kind: {implementation: {**values, "host": "127.0.0.1", "port": ports[name]}}}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(_process(folder, name, config)) for name in servers}
        for name, process in processes.items():
            _wait(ports[name], process, folder / f"{name}.txt")
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


@contextlib.contextmanager
def _process(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    [(kind, implementations)] = config[name].items()
    [implementation] = implementations
    environment = os.environ | {
        "NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": name, "PYTHONPATH": str(gym_folder()),
    }  # fmt: skip
    command = [PYTHON, f"{kind}/{implementation}/app.py"]
    with (
        (folder / f"{name}.txt").open("wb") as log,
        subprocess.Popen(command, cwd=gym_folder(), env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _STARTS
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/", timeout=30)
            return
        except httpx.HTTPError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.25)
